"""Whole configurations: a resumed run equals the straight one bit for bit, and every stage equals stage 0."""

from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.random_stacks.engines import build, mean_over_ranks
from tests.random_stacks.menu import draw_config, is_lossy, possible, tolerance_of
from tests.random_stacks.models import WordModel, batch_of
from tests.random_stacks.resuming import at_stage_zero, differs_from, end_of, train_and_resume
from tests.random_stacks.stack import Config, End, Stack, run_on_ranks


def draw(seed: int) -> Stack:
    """Returns the configuration of a seed, and a model for it."""
    dice = Random(seed)
    config, optimizer = draw_config(dice)
    zero = config["zero_optimization"]
    world = dice.choice((1, 2, 2, 3))
    if zero.get("zero_hpz_partition_size") or zero.get("mics_shard_size"):
        world = dice.choice((2, 4, 4))
    config = possible(dice, config, optimizer, world)
    zero = config["zero_optimization"]
    has_half = "fp16" in config or config.get("torch_autocast", {}).get("dtype") == "float16"
    model = {
        "tied": dice.random() < 0.4,
        "frozen": dice.random() < 0.3,
        "unused": dice.random() < 0.3 and zero.get("ignore_unused_parameters", True),
        "sparse": "sparse_gradients" in config and dice.random() < 0.7,
        "adapters": dice.random() < 0.1,
        "shared_base": dice.random() < 0.5,
    }
    options = {
        "model": {name: True for name, is_on in model.items() if is_on},
        "groups": dice.random() < 0.3,
        "loss.backward": dice.random() < 0.3 and not has_half,
    }
    return Stack("configurations", seed, world, config, optimizer, options)


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Runs the stack of features that a seed draws, and returns its outcome."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on every rank."""

    def built(config: Config, seed: int) -> Any:
        torch.manual_seed(seed)
        return build(stack, WordModel(**stack.options["model"]), config)

    def train(engine: Any, start: int, stop: int) -> list[float]:
        return train_steps(engine, start, stop, by_engine=not stack.options["loss.backward"])

    config = stack.config_in(folder)
    straight, resumed = train_and_resume(config, f"{folder}/saved", built, train)
    plain: list[str] = []
    if not is_lossy(config):
        plain = differs_from(straight, at_stage_zero(config), built, train, tolerance_of(config))
    return end_of(stack, resumed, plain, straight.losses)


def train_steps(engine: Any, start: int, stop: int, *, by_engine: bool) -> list[float]:
    """Trains from step ``start`` to ``stop``; returns the means over the ranks of the losses of micro-batches.

    A hybrid engine generates before each micro-batch, which must not change anything.
    """
    losses = []
    micro_batches = engine.gradient_accumulation_steps()
    for number in range(start * micro_batches, stop * micro_batches):
        ids, labels = batch_of(number, dist.get_rank())
        if hasattr(type(engine), "generate"):
            with torch.no_grad():
                engine.eval()
                assert engine.generate(ids).shape[1] == ids.shape[1] + 1
                engine.train()
        loss = engine(ids, labels)
        if by_engine:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
        losses.append(mean_over_ranks(loss))
    return losses
