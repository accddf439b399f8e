"""Training in the kernel of a notebook: cells that run again, that are interrupted, and that start several ranks."""

import os
import re
import time
from pathlib import Path
from queue import Empty

import pytest

from deepspeed.ports import free_port

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

PATIENCE = 200  # seconds, for what takes one or two where nothing else runs
pytestmark = pytest.mark.timeout(900)

IMPORTS = """
import torch, deepspeed

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def batch_of(step):
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(dim=1, keepdim=True)

def settings(stage, micro_batch=12):
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": stage},
    }

def train(engine, first, last):
    for step in range(first, last):
        x, y = batch_of(step)
        loss = (engine(x) - y).pow(2).mean()
        engine.backward(loss)
        engine.step()
    return round(loss.item(), 6)
"""
START = """
engine, *_ = deepspeed.initialize(model=build(), config=settings({stage}))
print("loss", train(engine, 0, 5))
"""


class Kernel:
    """A running kernel, as a notebook has one."""

    def __init__(self):
        variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        variables |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[3])}
        variables |= {"OMP_NUM_THREADS": "1"}
        self.manager, self.client = manager.start_new_kernel(PATIENCE, "python3", env=variables)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def begin(self, cell):
        return self.client.execute(cell, store_history=True)

    def wait_for_output(self):
        """Waits until a cell prints: an interrupt before it runs would be lost."""
        while self.client.get_iopub_msg(timeout=PATIENCE)["msg_type"] != "stream":
            continue

    def interrupt(self, message):
        """Interrupts a cell as a user does, who presses the button again when nothing happens; what `finish` gives.

        Python drops an exception that arrives in a destructor or in the callback of a weak reference, an interrupt too.
        A rank that hangs does not end at any of these.
        """
        printed, errors = [], []
        for _ in range(6):
            self.manager.interrupt_kernel()
            try:
                return self.finish(message, timeout=60, printed=printed, errors=errors)
            except Empty:  # on a busy machine perhaps between the error and the end of the cell
                continue
        pytest.fail("six interrupts did not end the cell, which printed: " + "".join(printed))

    def finish(self, message, timeout=PATIENCE, printed=None, errors=None):
        """Waits for a cell: (the error's name or None, what it has printed); both lists keep what came before."""
        printed = [] if printed is None else printed
        errors = [] if errors is None else errors
        deadline = time.monotonic() + timeout
        while True:
            found = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.1))
            if found["parent_header"].get("msg_id") != message:
                continue
            content = found["content"]
            if found["msg_type"] == "stream":
                printed.append(content["text"])
            elif found["msg_type"] == "error":
                errors.append(content["ename"])
                printed.append("\n".join(content["traceback"]))
            elif found["msg_type"] == "status" and content["execution_state"] == "idle":
                return (errors[0] if errors else None), "".join(printed)

    def run(self, cell):
        return self.finish(self.begin(cell))


@pytest.fixture
def kernel():
    one = Kernel()
    yield one
    one.stop()


def succeed(answer):
    error, printed = answer
    assert error is None, printed
    return re.findall(r"loss ([\d.]+)", printed)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_cell_may_run_again_and_be_interrupted(kernel, stage):
    succeed(kernel.run(IMPORTS))
    (first,) = succeed(kernel.run(START.format(stage=stage)))
    # The engine of the first run is replaced while it exists.
    assert succeed(kernel.run(START.format(stage=stage))) == [first]
    (more,) = succeed(kernel.run("print('loss', train(engine, 5, 9))"))

    # An interrupt may arrive at an instruction that belongs to no line, and the longer reports of IPython fail there.
    succeed(kernel.run("%xmode Minimal"))
    for pause in (0.1, 0.2, 0.4):  # wherever in a step it comes
        message = kernel.begin("print('going on', flush=True)\nwhile True: train(engine, 0, 5)")
        kernel.wait_for_output()
        time.sleep(pause)
        error, printed = kernel.interrupt(message)
        assert error == "KeyboardInterrupt", printed
        succeed(kernel.run("print('loss', train(engine, 5, 9))"))  # the same engine continues
    assert succeed(kernel.run(START.format(stage=stage))) == [first]
    assert succeed(kernel.run("print('loss', train(engine, 5, 9))")) == [more]


LAUNCHED = """
def launched(stage):
    import os
    from accelerate import Accelerator, DeepSpeedPlugin
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage, 6)))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    engine, optimizer = accelerator.prepare(model, optimizer)
    rank = accelerator.process_index
    for step in range(5):
        x, y = (part.chunk(2)[rank] for part in batch_of(step))
        loss = (engine(x) - y).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.reduce(loss.detach(), "mean")
    if rank == 0:
        print(f"loss {whole.item():.6f} on {accelerator.num_processes} ranks, stage {stage}", flush=True)

from accelerate import notebook_launcher
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_notebook_launcher_starts_ranks_again_and_again(kernel, stage):
    pytest.importorskip("accelerate")
    succeed(kernel.run(IMPORTS + LAUNCHED))
    cell = f"notebook_launcher(launched, ({stage},), num_processes=2, use_port='{free_port()}')"
    first = succeed(kernel.run(cell))
    assert len(first) == 1
    assert succeed(kernel.run(cell)) == first
