"""Ranks on simulated devices that talk as over NCCL: the same values as on the CPU, and nobody waits in silence."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import CommunicationError, DivergenceError
from tests.device.support import engine_at
from tests.engine.support import inputs, rank
from tests.harness import RankDied, run_ranks
from tests.harness.device import simulated_rank


def _train(stage: int, on_device: bool) -> list[float]:
    def run() -> list[float]:
        engine = engine_at(stage, precision="fp32", gradient_clipping=0.5)
        losses = []
        for number in range(3):
            loss = engine(inputs(number, rank()).to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    if not on_device:
        return run()
    with simulated_rank():
        return run()


@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_as_on_the_cpu(stage: int) -> None:
    on_device = run_ranks(_train, 2, stage, True, backend=None)
    on_cpu = run_ranks(_train, 2, stage, False)
    assert torch.allclose(torch.tensor(on_device), torch.tensor(on_cpu), rtol=1e-5)


def _reads_behind_transfers() -> tuple[list[float], list[float]]:
    with simulated_rank():
        group: Any = dist.group.WORLD
        mine = torch.full((1,), rank() + 1, device="cuda")
        both = torch.zeros(2, dtype=mine.dtype, device="cuda")
        freed = torch.full((1,), rank() + 5.0, device="cuda")
        behind = torch.zeros(2, device="cuda")
        if rank() == 1:
            time.sleep(0.2)
        group._allgather_base(both, mine)  # the next one begins when rank 1 has come
        group._allgather_base(behind, freed).wait()
        freed.untyped_storage().resize_(0)
        found = behind.tolist()
        if rank() == 1:
            time.sleep(0.2)
        work = group._allgather_base(both, mine * 2)
        work.wait()
        return both.to(torch.float64).tolist(), found


def test_casts_and_frees_come_after_the_transfers_they_wait_for() -> None:
    assert run_ranks(_reads_behind_transfers, 2, backend=None) == [([2.0, 4.0], [5.0, 6.0])] * 2


def _complaint(action: Any) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        action()
    except (CommunicationError, DivergenceError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _third_step(folder: str, what: str) -> None:
    """Two steps alike; then rank 1 does something else, at a place where no rank asks the others."""
    with simulated_rank():
        engine = engine_at(3, precision="fp32", zero={"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0})
        model = engine.module
        for number in range(2):
            engine.backward(engine(inputs(number, rank()).to(engine.device)))
            engine.step()
        if rank() == 1 and what == "uses a layer again":
            forward = model.forward
            model.forward = lambda x: forward(x) + model.first(x).sum()

        def train() -> None:
            for number in range(3):
                loss = engine(inputs(number, rank()).to(engine.device))
                if rank() == 1 and what == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.backward(loss)
                loss.item()  # nobody supervises this wait
                engine.step()

        Path(folder, str(rank())).write_text(json.dumps(_complaint(train)))
        if what != "dies":  # the store, and in it the reason, is rank 0's
            _wait_for(Path(folder, str(1 - rank())))
        os._exit(0)  # the communicators are gone, and with them the end of the block


@pytest.mark.parametrize("what", ["dies", "uses a layer again"])
def test_a_rank_that_does_something_else_is_named_by_the_others(tmp_path: Path, what: str) -> None:
    """The host does not wait for transfers here; what waits is a stream of the device."""
    with pytest.raises(RankDied):
        run_ranks(_third_step, 2, str(tmp_path), what, backend=None, fresh=True)
    kind, words, seconds = json.loads((tmp_path / "0").read_text())
    assert seconds < 60, words
    if what == "dies":
        assert (
            kind == "CommunicationError" and "the process of rank 1 has died" in words and "rank 0 waits for" in words
        )
    else:
        assert kind == "DivergenceError" and "rank 0 waits for" in words and "rank 1 waits for" in words
        assert json.loads((tmp_path / "1").read_text())[:2] == [kind, words]
