"""Checkpoints that are loaded by other numbers of ranks and at other stages: losses equal those of one rank without.

The batch stays 12 samples. Each rank takes its micro-batches of it, so the mean loss of a step does not depend on the
number of ranks.
"""

from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.harness.errors import RanksFailed
from tests.random_programs.trial import failure_of
from tests.random_stacks.engines import build, mean_over_ranks
from tests.random_stacks.menu import draw_config, draw_zero, is_lossy, possible, tolerance_of
from tests.random_stacks.models import ROWS, WordModel, batch_of
from tests.random_stacks.resuming import end_of
from tests.random_stacks.stack import Config, End, Stack

BATCH = 12
SAMPLES = 5 * BATCH  # of a loader; three phases begin a second epoch
_LOADERS = ("", "", "shuffled", "difficulty")
STEPS = 2  # of each phase
# Each rank draws for itself what it drops, or rounds what only it sends.
_PER_RANK = ("progressive_layer_drop", "data_efficiency", "communication_compression")


def draw(seed: int) -> Stack:
    """Returns the features of a seed, and two or three phases with their ranks and ``zero_optimization``."""
    dice = Random(seed)
    config, optimizer = draw_config(dice)
    for key in (*_PER_RANK, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.pop(key, None)
    while True:
        phases = [_phase(dice, config, optimizer) for _ in range(dice.choice((2, 3, 3)))]
        if not any(is_lossy({**config, "zero_optimization": phase["zero"]}) for phase in phases):
            break
        if is_lossy({**config, "zero_optimization": {"stage": 0}}):  # an optimizer that compresses
            config, optimizer = {**config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "SGD"
    if dice.random() < 0.3:
        config["elasticity"] = {
            "enabled": True, "version": 0.1, "max_train_batch_size": BATCH, "micro_batch_sizes": [ROWS],
            "min_gpus": 1, "max_gpus": 6,
        }  # fmt: skip
    else:
        config |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": ROWS}
    model = {name: True for name in ("tied", "frozen", "unused", "adapters", "shared_base") if dice.random() < 0.25}
    if not all(phase["zero"].get("ignore_unused_parameters", True) for phase in phases):
        model.pop("unused", None)
    options = {"model": model, "groups": dice.random() < 0.4, "phases": phases, "universal": dice.random() < 0.3}
    options["loader"] = dice.choice(_LOADERS)
    if options["loader"] == "difficulty":
        config["data_efficiency"] = _selection()
    return Stack("worlds", seed, max(phase["world"] for phase in phases), config, optimizer, options)


def _phase(dice: Random, config: Config, optimizer: str) -> dict[str, Any]:
    world = dice.choice((1, 2, 2, 3, 3))
    zero = possible(dice, {**config, "zero_optimization": draw_zero(dice)}, optimizer, world)["zero_optimization"]
    return {"world": world, "zero": zero}


def _selection() -> Config:
    """Returns a section that draws samples by their difficulties, which :func:`_write_difficulties` writes."""
    metric = {
        "index_to_sample_path": "FOLDER/samples",
        "index_to_metric_path": "FOLDER/values",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 4,
        "max_difficulty": 20,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2},
    }
    learning = {"enabled": True, "curriculum_metrics": {"length": metric}}
    return {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 20, "curriculum_learning": learning}}


def _write_difficulties(folder: str) -> None:
    from deepspeed.data.indexed import write_dataset

    values = [7 * number % 20 + 1 for number in range(SAMPLES)]
    distinct = sorted(set(values))
    rows = [[number for number, value in enumerate(values) if value == each] for each in distinct]
    sizes = numpy.array([len(row) for row in rows])
    write_dataset(Path(folder) / "samples", numpy.array(sum(rows, []), dtype=numpy.uint8), sizes)
    ones = numpy.ones(len(distinct), int)
    write_dataset(Path(folder) / "values", numpy.array(distinct, dtype=numpy.uint8), ones)


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Runs the stack of features that a seed draws, and returns its outcome."""
    losses: list[float] = []
    if stack.options["loader"] == "difficulty":
        _write_difficulties(folder)
    try:
        for number, phase in enumerate(stack.options["phases"]):
            losses = run_ranks(train_phase, phase["world"], stack, number, folder, losses, timeout=timeout)[0]
            if stack.options["universal"]:
                _convert(folder, number)
        wanted = run_ranks(train_plainly, 1, stack, folder, timeout=timeout)[0]
    except RanksFailed as error:
        return failure_of(error)
    tolerance = tolerance_of(stack.config)
    problems = []
    if any(not abs(x - y) <= tolerance * abs(y) for x, y in zip(losses[:-1], wanted[:-1], strict=True)):
        problems.append(f"losses and learning rate {losses[:-1]}, on one rank without sharding {wanted[:-1]}")
    if losses[-1] != wanted[-1]:
        problems.append(f"skipped steps {losses[-1]}, on one rank without sharding {wanted[-1]}")
    return end_of(stack, [], problems, losses[:-2])


def _convert(folder: str, number: int) -> None:
    from deepspeed.checkpoint import ds_to_universal

    where = f"{folder}/phase{number}"
    assert ds_to_universal.main(["--input_folder", f"{where}/tag", "--output_folder", f"{where}/universal"]) == 0


def _built(stack: Stack, config: Config, seed: int) -> Any:
    torch.manual_seed(seed)
    data = None
    if stack.options["loader"]:
        data = [tuple(part[0] for part in batch_of(number, 0)) for number in range(SAMPLES)]
    return build(stack, WordModel(**stack.options["model"]), config, data)


def train_phase(stack: Stack, number: int, folder: str, before: list[float]) -> list[float]:
    """Runs a phase on every rank; returns the losses of its steps after those ``before`` it, rate and skipped steps."""
    config = {**stack.config_in(folder), "zero_optimization": stack.options["phases"][number]["zero"]}
    config = Stack(stack.kind, 0, 0, config, "").config_in(folder)
    tag = "tag"
    if stack.options["universal"]:
        config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        tag = "universal"
    engine = _built(stack, config, 5 if number == 0 else 99)
    if number:
        path, _ = engine.load_checkpoint(f"{folder}/phase{number - 1}", tag=tag)
        assert path is not None, "the checkpoint was not found"
        before = before[:-2]
    losses = before + train(engine, number * STEPS, (number + 1) * STEPS)
    engine.save_checkpoint(f"{folder}/phase{number}", tag="tag")
    results = [*losses, engine.get_lr()[0], float(engine.skipped_steps)]
    engine.destroy()
    return results


def train_plainly(stack: Stack, folder: str) -> list[float]:
    """Trains all phases in one run, on one rank at stage 0, for comparison."""
    config = stack.config_in(folder)
    config["zero_optimization"] = {"stage": 0}
    engine = _built(stack, config, 5)
    losses = train(engine, 0, STEPS * len(stack.options["phases"]))
    results = [*losses, engine.get_lr()[0], float(engine.skipped_steps)]
    engine.destroy()
    return results


def train(engine: Any, start: int, stop: int) -> list[float]:
    """Trains from step ``start`` to ``stop``; returns the mean loss over the samples of each batch."""
    from deepspeed.runtime.dataloader import RepeatingLoader

    losses = []
    rank, world, in_batch = dist.get_rank(), dist.get_world_size(), BATCH // ROWS
    loader = engine.training_dataloader
    batches = None if loader is None else iter(RepeatingLoader(loader))
    for step in range(start, stop):
        total = 0.0
        for place in range(rank, in_batch, world):
            loss = engine(*(batch_of(step * in_batch + place, 0) if batches is None else next(batches)))
            engine.backward(loss)
            engine.step()
            total += mean_over_ranks(loss)
        losses.append(total * world / in_batch)
    return losses
