"""Whatever wrote a checkpoint, any number of ranks at any stage reads it: every value, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from tests.checkpoint.training import PRECISIONS, Net, config, engine, fragments, groups, joined, other_state, train
from tests.harness import assert_states_equal, run_ranks

RANKS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 300}}


def tag_of(ranks: int, stage: int, precision: str) -> str:
    return f"{ranks}x{stage}-{precision}"


def write(folder: str, ranks: int, stages: tuple[int, ...], precision: str):
    """Trains and saves at each stage; returns what was saved."""
    saved = {}
    for stage in stages:
        run = engine(stage, precision)
        train(run, range(3))
        run.save_checkpoint(folder, tag=tag_of(ranks, stage, precision))
        saved[tag_of(ranks, stage, precision)] = fragments(run), other_state(run)
    return saved


def read(folder: str, tags: list[str], stages: tuple[int, ...], precision: str, further: dict):
    """Loads each checkpoint at each stage into an engine with other values; returns what it then holds."""
    found = {}
    for stage in stages:
        run = engine(stage, precision, seed=8, **further)
        train(run, range(7, 8))
        for tag in tags:
            run.load_checkpoint(folder, tag=tag)
            held = fragments(run), other_state(run)
            loss = train(run, range(3, 4))
            found[(stage, tag)] = held, loss
    return found


def merge(results: list[dict]) -> dict:
    """Per checkpoint the whole parameters and what all ranks agree on."""
    made = {}
    for key in results[0]:
        other = [rank[key][1] for rank in results]
        for entry in other[1:]:
            assert_states_equal(entry, other[0])
        made[key] = joined([rank[key][0] for rank in results]), other[0]
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints of all topologies, and what they hold."""
    folder = str(tmp_path_factory.mktemp("written"))
    saved: dict = {}
    for ranks in RANKS:
        saved.update(merge(run_ranks(write, ranks, folder, ranks, STAGES, "bf16", timeout=120)))
    return folder, saved


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("further", [pytest.param({}, id="same"), pytest.param(SMALL_BUCKETS, id="small-buckets")])
def test_every_topology_reads_every_other(ranks, further, written):
    folder, saved = written
    tags = [tag for tag in saved if not further or tag.startswith(("2x", "3x3"))]
    results = run_ranks(read, ranks, folder, tags, STAGES, "bf16", further, timeout=240)
    for key in results[0]:
        held, expected = merge([{key: rank[key][0]} for rank in results])[key], saved[key[1]]
        assert_states_equal(held[0], expected[0])
        assert_states_equal(held[1], expected[1])
    # The next step is the same wherever it is taken, but for the order of sums over ranks.
    mean = {key: sum(rank[key][1][0] for rank in results) / ranks for key in results[0]}
    assert max(mean.values()) - min(mean.values()) < 1e-2


HOMES = ((1, "cpu", None), (2, "nvme", None), (3, "none", "cpu"), (3, "cpu", "nvme"), (3, "nvme", "nvme"))
"""Stage, home of the optimizer's states, home of the parameters."""


def offload(stage: int, states: str, parameters: str | None, files: str) -> dict:
    zero: dict = {"offload_optimizer": {"device": states, "nvme_path": files}} if states != "none" else {}
    if parameters:
        zero["offload_param"] = {"device": parameters, "nvme_path": files, "buffer_size": 10_000}
    return {"zero_optimization": zero}


def write_from_homes(folder: str, ranks: int, files: str):
    saved = {}
    for stage, *homes in HOMES:
        run = engine(stage, "bf16", **offload(stage, *homes, files))
        train(run, range(3))
        tag = f"{ranks}x{stage}-{'-'.join(map(str, homes))}"
        run.save_checkpoint(folder, tag=tag)
        saved[tag] = fragments(run), other_state(run)
        run.destroy()
    return saved


def read_into_homes(folder: str, tags: list[str], files: str):
    found = {}
    for stage, *homes in (*HOMES, (0, "none", None), (2, "none", None)):
        run = engine(stage, "bf16", seed=8, **offload(stage, *homes, files))
        train(run, range(7, 8))
        for tag in tags:
            run.load_checkpoint(folder, tag=tag)
            held = fragments(run), other_state(run)
            found[(stage, *homes, tag)] = held, train(run, range(3, 5))
        run.destroy()
    return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_home_reads_every_other(ranks, written, tmp_path):
    plain, saved = written[0], dict(written[1])
    homes = str(tmp_path / "homes")
    for writers in (1, 2):
        made = run_ranks(write_from_homes, writers, homes, writers, str(tmp_path / "files"), timeout=120)
        saved.update(merge(made))
    here = [tag for tag in saved if tag not in written[1]]
    results = [
        run_ranks(read_into_homes, ranks, folder, tags, str(tmp_path / "files"), timeout=240)
        for folder, tags in ((homes, here), (plain, ["1x0-bf16", "4x1-bf16", "3x3-bf16"]))
    ]
    for group in results:
        for key, (held, _) in ((key, (merge([{key: r[key][0]} for r in group])[key], 0)) for key in group[0]):
            assert_states_equal(held[0], saved[key[-1]][0])
            assert_states_equal(held[1], saved[key[-1]][1])
        steps = {
            key: [sum(values) / ranks for values in zip(*(r[key][1] for r in group), strict=True)] for key in group[0]
        }
        for first, second in steps.values():
            reference = next(iter(steps.values()))
            assert abs(first - reference[0]) < 1e-2 and abs(second - reference[1]) < 1e-2


def read_precision(folder: str, tags: list[str], precision: str):
    """The values that a run of another precision takes over."""
    found = {}
    for stage in (0, 3):
        run = engine(stage, precision, seed=8)
        for tag in tags:
            run.load_checkpoint(folder, tag=tag)
            found[(stage, tag)] = fragments(run), None
    return found


@pytest.fixture(scope="module")
def precisions(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("precisions"))
    saved: dict = {}
    for precision in PRECISIONS:
        saved.update(merge(run_ranks(write, 2, folder, 2, (1, 3), precision, timeout=120)))
    return folder, saved


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_reads_every_other(precision, precisions):
    folder, saved = precisions
    results = run_ranks(read_precision, 1, folder, list(saved), precision, timeout=120)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for (_, tag), (held, _) in merge(results).items():
        expected = saved[tag][0]
        for key, values in expected.items():
            kind, name = key.split("/")
            if kind == "master" or kind.startswith("state."):
                assert_states_equal(held[key], values)
                if kind == "master":
                    assert_states_equal(held[f"compute/{name}"], values.to(dtype))
            elif f"master/{name}" not in expected:  # frozen: saved in the precision of its run only
                assert_states_equal(held[key], values.to(dtype))


class Reordered(Net):
    """The same names in another order, and one frozen parameter more in front."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(reversed(list(self._modules.items())))
        parameters = dict(reversed(list(self._parameters.items())))
        self._modules.clear()
        self._parameters.clear()
        self._parameters["adapter"] = nn.Parameter(torch.full((6, 5), 7.0), requires_grad=False)
        self._parameters.update(parameters)
        self._modules.update(modules)


def save_and_load_reordered(folder: str, stage: int):
    first = engine(stage)
    train(first, range(3))
    first.save_checkpoint(folder)
    torch.manual_seed(8)
    model = Reordered()
    parameters = list(reversed(groups(model)))  # the groups change places too
    again = deepspeed.initialize(model=model, config=config(stage), model_parameters=parameters)[0]
    with pytest.raises(deepspeed.errors.CheckpointError, match="missing +adapter"):
        again.load_checkpoint(folder)
    again.load_checkpoint(folder, load_module_strict=False)
    rates = [(group["weight_decay"], group["lr"]) for group in again.basic_optimizer.param_groups]
    expected = [(group["weight_decay"], group["lr"]) for group in reversed(first.basic_optimizer.param_groups)]
    assert rates == expected
    return fragments(first), fragments(again)


@pytest.mark.parametrize("stage", [0, 3])
def test_matching_is_by_name(stage, tmp_path):
    results = run_ranks(save_and_load_reordered, 2, str(tmp_path), stage)
    expected, held = joined([rank[0] for rank in results]), joined([rank[1] for rank in results])
    assert held.pop("compute/adapter").tolist() == [7.0] * 30
    # The tied matrix is now first met as the head.
    for kind in ("compute", "master", "state.exp_avg", "state.exp_avg_sq", "state.step"):
        held[f"{kind}/embed.weight"] = held.pop(f"{kind}/head.weight")
    assert_states_equal(held, expected)
