"""Calls that only read, save or move states, between micro-batches: training goes on bit for bit as without them."""

from __future__ import annotations

from random import Random

import torch.distributed as dist

from tests.random_stacks import configurations
from tests.random_stacks.call_run import READS, CallRun
from tests.random_stacks.documented import reason_of
from tests.random_stacks.resuming import counts_of
from tests.random_stacks.stack import End, Stack, run_on_ranks

STEPS = 4


def draw(seed: int) -> Stack:
    """Returns the configuration of a seed with calls: the number of the micro-batch, the name and a salt of each."""
    stack = configurations.draw(seed)
    dice = Random(f"watched {seed}")
    micro_batches = STEPS * stack.config["gradient_accumulation_steps"]
    calls = [
        [number, dice.choice(list(READS)), dice.randrange(1000)]
        for number in range(micro_batches)
        for _ in range(dice.choice((0, 0, 1, 2)))
    ]
    model = {key: value for key, value in stack.options["model"].items() if key != "adapters"}
    options = {"model": model, "groups": stack.options["groups"], "calls": calls}
    return Stack("watched", seed, stack.world, stack.config, stack.optimizer, options)


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Returns how the stack of a seed ends."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on every rank."""
    alone = train(stack, f"{folder}/alone", has_calls=False)
    watched = train(stack, f"{folder}/watched", has_calls=True)
    for number, (wanted, found) in enumerate(zip(alone, watched, strict=True)):
        if wanted != found:
            calls = [call for call in stack.options["calls"] if call[0] <= number]
            text = f"micro-batch {number}: {found}, without calls {wanted}; calls {calls}"
            reason = reason_of("resumed", stack, text) if any(name == "save_and_return" for _, name, _ in calls) else ""
            return ("documented", reason) if reason else ("different", text)
    return "equal", ""


def train(stack: Stack, folder: str, *, has_calls: bool) -> list[str]:
    """Returns the loss of each micro-batch, then the counters, rates and all parameters, as text of exact numbers."""
    import deepspeed

    run = CallRun(stack, stack.config_in(folder), folder)
    results = []
    for number in range(STEPS * run.engine.gradient_accumulation_steps()):
        for at, name, salt in stack.options["calls"]:
            if has_calls and at == number:
                batches = run.batches
                READS[name](run, 0.0, salt)
                run.batches = batches
        results.append(repr(run.train()))
    results += [repr(counts_of(run.engine)), repr(run.engine.get_lr())]
    with deepspeed.zero.GatheredParameters(list(run.engine.module.parameters())):
        sums = run.sums_of(run.engine.module.state_dict())
    del sums["mean"]  # each rank has its own; loading makes it that of rank 0, as load_checkpoint says
    results.append(repr(sums))
    run.engine.destroy()
    dist.barrier()
    return results
