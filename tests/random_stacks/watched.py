"""Calls that only read, save or move states, between micro-batches: training goes on bit for bit as without them."""

from random import Random
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from tests.random_stacks import configurations, layouts
from tests.random_stacks.call_run import READS, CallRun
from tests.random_stacks.documented import reason_of
from tests.random_stacks.resuming import counts_of
from tests.random_stacks.stack import Config, End, Stack, run_on_ranks

STEPS = 4


def draw(seed: int) -> Stack:
    """Returns the configuration or layout of a seed with calls: a micro-batch or step, the name and a salt of each."""
    dice = Random(f"watched {seed}")
    stack = (configurations if dice.random() < 0.6 else layouts).draw(seed)
    options = {key: value for key, value in stack.options.items() if key != "loss.backward"}
    if stack.kind == "configurations":
        times = STEPS * stack.config["gradient_accumulation_steps"]
        options["model"] = {key: value for key, value in options["model"].items() if key != "adapters"}
    else:
        times = STEPS
    options["calls"] = [
        [number, dice.choice(list(READS)), dice.randrange(1000)]
        for number in range(times)
        for _ in range(dice.choice((0, 0, 1, 2)))
    ]
    return Stack("watched", seed, stack.world, stack.config, stack.optimizer, options)


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Runs the stack of features that a seed draws, and returns its outcome."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on every rank."""
    alone = train(stack, f"{folder}/alone", has_calls=False)
    watched = train(stack, f"{folder}/watched", has_calls=True)
    for number, (wanted, found) in enumerate(zip(alone, watched, strict=True)):
        if wanted != found:
            calls = [call for call in stack.options["calls"] if call[0] <= number]
            text = f"result {number}: {found}, without calls {wanted}; calls {calls}"
            reason = reason_of("resumed", stack, text) if any(name == "save_and_return" for _, name, _ in calls) else ""
            return ("documented", reason) if reason else ("different", text)
    return "equal", ""


class LayoutRun(CallRun):
    """The calls of an engine with pipeline, tensor, sequence or expert ranks. Trains a step at a time."""

    def __init__(self, stack: Stack, config: Config, folder: str) -> None:
        self.layout = layouts.Layout(stack, stack.options)
        super().__init__(stack, config, folder)

    @override
    def built(self, seed: int) -> Any:
        return self.layout.build(self.config, seed)

    @override
    def train(self, _share: float = 0.0, _salt: int = 0) -> Any:
        self.batches += 1
        return self.layout.train(self.engine, self.batches - 1, self.batches)

    @override
    def evaluate(self, _share: float, salt: int) -> float:
        return self.layout.evaluate(self.engine, salt)


def train(stack: Stack, folder: str, *, has_calls: bool) -> list[str]:
    """Returns the losses, then the counters, rates and all parameters, as text of exact numbers."""
    import deepspeed

    config = stack.config_in(folder)
    is_layout = isinstance(stack.options["model"], str)
    run = LayoutRun(stack, config, folder) if is_layout else CallRun(stack, config, folder)
    times = STEPS * (1 if is_layout else run.engine.gradient_accumulation_steps())
    results = []
    for number in range(times):
        for at, name, salt in stack.options["calls"]:
            if has_calls and at == number:
                batches = run.batches
                getattr(run, name)(0.0, salt)
                run.batches = batches
        results.append(repr(run.train()))
    results += [repr(counts_of(run.engine)), repr(run.engine.get_lr())]
    with deepspeed.zero.GatheredParameters(list(run.engine.module.parameters())):
        sums = run.sums_of(run.engine.module.state_dict())
    sums.pop("mean", None)  # each rank has its own; loading makes it that of rank 0, as load_checkpoint says
    results.append(repr(sums))
    run.engine.destroy()
    dist.barrier()
    return results
