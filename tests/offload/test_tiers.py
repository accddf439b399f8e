"""Offload to the host and to files trains as without."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.errors import RanksFailed
from tests.harness.toy_models import awkward, param_groups
from tests.offload.training import Elsewhere, Trained, collect, config, make_engine, train, train_each, train_some

# Every legal pair of tiers at every stage trains bit for bit as without offload, at one and two ranks.


# Optimizer states in files work at every stage that shards them, parameters elsewhere at stage 3 alone.
CELLS = [
    (stage, optimizer, param)
    for stage, optimizer, param in itertools.product((1, 2, 3), ("none", "cpu", "nvme"), ("none", "cpu", "nvme"))
    if (optimizer, param) != ("none", "none") and (stage == 3 or param == "none")
]
_plain: dict[Any, list[Trained]] = {}


def offload(optimizer: str, param: str, folder: Path, *, pipelined: bool = False) -> dict[str, Any]:
    """The two sections for a pair of devices."""
    made: dict[str, Any] = {}
    if optimizer != "none":
        made["offload_optimizer"] = {"device": optimizer}
    if optimizer == "nvme":
        made["offload_optimizer"] |= {
            "nvme_path": str(folder),
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
            "fast_init": pipelined,
        }
    if param != "none":
        made["offload_param"] = {"device": param}
    if param == "nvme":
        made["offload_param"] |= {"nvme_path": str(folder), "max_in_cpu": 0}
    return made


def plain(ranks: int, **settings: Any) -> list[Trained]:
    """The same training without offload; run once per setting."""
    key = (ranks, *sorted(settings.items()))
    if key not in _plain:
        _plain[key] = run_ranks(train, ranks, config(**settings))
    return _plain[key]


def assert_same(got: list[Trained], expected: list[Trained]) -> None:
    """Bit for bit, on every rank."""
    for mine, theirs in zip(got, expected, strict=True):
        for part in ("norms", "compute", "masters", "states"):
            assert_states_equal(getattr(mine, part), getattr(theirs, part))


def tiers_of(trained: Trained, kind: str) -> set[str]:
    return {tier for name, tier in trained.tiers if name == kind}


TIER = {"none": "device", "cpu": "host", "nvme": "file"}


def cell_settings(ranks: int, stage: int, optimizer: str, param: str) -> dict[str, Any]:
    """The cells differ in precision too; every precision meets every device."""
    precision = ("bf16", "fp32", "fp16")[(stage + ranks + len(optimizer) + len(param)) % 3]
    return {"stage": stage, "precision": precision, "accumulation": 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_cells(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = [cell_settings(ranks, *cell) for cell in CELLS]
    plain = [config(**settings) for settings in every]
    offloaded = [
        config(**settings, **offload(optimizer, param, tmp_path, pipelined=ranks == 2))
        for settings, (_, optimizer, param) in zip(every, CELLS, strict=True)
    ]
    for got in run_ranks(train_each, ranks, [*plain, *offloaded], timeout=240):
        for cell, expected, trained in zip(CELLS, got, got[len(CELLS) :], strict=False):
            stage, optimizer, param = cell
            assert_same([trained], [expected])
            assert tiers_of(trained, "optimizer state") == {TIER[optimizer]}, cell
            assert tiers_of(trained, "master weights") <= {TIER[optimizer]}, cell
            if stage == 3:
                assert tiers_of(trained, "compute parameters") == {TIER[param]}, cell
    assert not list(tmp_path.iterdir()), "destroy() removes the files"
    with capsys.disabled():
        print(f"\noffload: {len(CELLS)} cells of stage, optimizer tier and parameter tier ran on {ranks} rank(s)")
    assert len(CELLS) == 12


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_mix(precision: str, accumulation: int, tmp_path: Path) -> None:
    """Without clipping, in small chunks, with read-ahead only and write-behind only."""
    settings: dict[str, Any] = {"stage": 3, "precision": precision, "accumulation": accumulation, "clip": 0.0}
    sections = offload("nvme", "nvme", tmp_path)
    sections["offload_optimizer"] |= {"pipeline_read": accumulation == 1, "pipeline_write": accumulation == 3}
    got = run_ranks(train, 2, config(**settings, **sections, sub_group_size=1))
    assert_same(got, plain(2, **settings))


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_overflow_changes_nothing(optimizer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stage": 2, "precision": "fp16"}
    expected = run_ranks(train, 2, config(**settings), 4, 1)
    got = run_ranks(train, 2, config(**settings, **offload(optimizer, "none", tmp_path)), 4, 1)
    assert not math.isfinite(expected[0].norms[1])
    assert_same(got, expected)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_ratio_offloads_a_share(device: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stage": 3, "precision": "bf16"}
    sections = offload(device, "none", tmp_path)
    sections["offload_optimizer"]["ratio"] = 0.5
    got = run_ranks(train, 2, config(**settings, **sections))
    assert_same(got, plain(2, **settings))
    away = got[0].tiers["master weights", TIER[device]]
    share = away / (away + got[0].tiers["master weights", "device"])
    assert 0.4 < share < 0.75, share  # in whole buckets


def test_host_memory_before_files(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stage": 3, "precision": "bf16"}
    sections = offload("none", "nvme", tmp_path)
    sections["offload_param"]["max_in_cpu"] = 1000
    got = run_ranks(train, 2, config(**settings, **sections))
    assert_same(got, plain(2, **settings))
    assert tiers_of(got[0], "compute parameters") == {"host", "file"}
    assert 0 < got[0].tiers["compute parameters", "host"] <= 2 * 1000


# Offload with what it must work with: checkpoints, other optimizers, several engines, changing parameters, memory.


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks(2)
def test_checkpoints(precision: str, tmp_path: Path) -> None:
    """Saves in the middle with one placement, continues with another."""
    plain = config(3, precision=precision)
    host = config(3, precision=precision, **offload("cpu", "cpu", tmp_path / "files"))
    filed = config(3, precision=precision, **offload("nvme", "nvme", tmp_path / "files", pipelined=True))
    for number, (saving, loading) in enumerate(((plain, filed), (filed, host), (host, plain))):
        folder = str(tmp_path / str(number))
        straight = make_engine(saving)
        train_some(straight, range(2))
        straight.save_checkpoint(folder)
        train_some(straight, range(2, 4))
        expected = collect(straight, [])
        straight.destroy()
        engine = make_engine(loading)
        train_some(engine, range(7, 8))  # something that loading must undo
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        train_some(engine, range(2, 4))
        got = collect(engine, [])
        engine.destroy()
        assert_states_equal(got.masters, expected.masters)
        assert_states_equal(got.compute, expected.compute)
        for mine, theirs in zip(got.states, expected.states, strict=True):
            assert_states_equal(mine, theirs)


def with_optimizer(kind: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    model = awkward()
    optimizer = {
        "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1),
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    }[kind](param_groups(model))
    settings = {key: value for key, value in settings.items() if key != "optimizer"}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    train_some(engine, range(3))
    masters = collect(engine, []).masters
    engine.destroy()
    return masters


@pytest.mark.parametrize("kind", ["adagrad", "sgd", "rmsprop"])
def test_a_clients_optimizer(kind: str, tmp_path: Path) -> None:
    expected = run_ranks(with_optimizer, 2, kind, config(2, precision="bf16"))
    for device in ("cpu", "nvme"):
        settings = config(2, precision="bf16", **offload(device, "none", tmp_path))
        if device == "nvme" and kind == "rmsprop":
            with pytest.raises(RanksFailed, match="RMSprop.*chunk by chunk"):
                run_ranks(with_optimizer, 2, kind, settings)
            continue
        assert_states_equal(run_ranks(with_optimizer, 2, kind, settings), expected)


def two_engines(settings: dict[str, Any], folder: str) -> None:
    first, second = make_engine(settings), make_engine(settings)
    inside = [name for name in Path(folder).iterdir() if name.is_dir()]
    dist.barrier()
    assert len(inside) == 2 * 2 * dist.get_world_size()  # parameters and optimizer of each engine on each rank
    for step in range(2):
        train_some(first, range(step, step + 1))
        train_some(second, range(step, step + 1))
    assert_states_equal(collect(second, []).masters, collect(first, []).masters)
    first.destroy()
    train_some(second, range(2, 3))
    second.destroy()


def test_several_engines(tmp_path: Path) -> None:
    run_ranks(two_engines, 2, config(3, precision="bf16", **offload("nvme", "nvme", tmp_path)), str(tmp_path))
    assert not list(tmp_path.iterdir())


def user_writes(settings: dict[str, Any], plain: dict[str, Any]) -> None:
    """Single parameters are read and written as without offload."""
    results = []
    for each in (plain, settings):
        engine = make_engine(each)
        train_some(engine, range(1))
        parameter = engine.module.blocks[1].rise.weight
        value = deepspeed.utils.safe_get_full_fp32_param(parameter)
        deepspeed.utils.safe_set_full_fp32_param(parameter, value * 0.5)
        moment = deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        with deepspeed.zero.GatheredParameters([engine.module.shift], modifier_rank=0):
            if dist.get_rank() == 0:
                engine.module.shift.data.fill_(0.25)
        train_some(engine, range(1, 3))
        results.append((value, moment, collect(engine, []).masters))
        engine.destroy()
    assert_states_equal(results[1], results[0])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_single_parameters(device: str, tmp_path: Path) -> None:
    settings = config(3, precision="bf16", **offload(device, device, tmp_path))
    run_ranks(user_writes, 2, settings, config(3, precision="bf16"))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_memory_is_the_formulas(device: str, tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        sections = offload(device, device if stage == 3 else "none", tmp_path)
        for trained in run_ranks(train, 2, config(stage, precision="bf16", **sections)):
            rows = {kind: (counted, expected) for kind, counted, expected, _ in trained.rows}
            for kind, (counted, expected) in rows.items():
                assert counted == pytest.approx(expected, rel=0.05), (stage, kind)
            assert rows["master weights"] == rows["optimizer state"] == (0, 0)
            assert sum(expected for kind, (_, expected) in rows.items() if "(" in kind) > 0


def test_refusals_name_the_key() -> None:
    with pytest.raises(DeepSpeedConfigError, match="nvme_path"):
        deepspeed.DeepSpeedConfig(config(2, offload_optimizer={"device": "nvme"}))


def unfrozen_late(every: list[dict[str, Any]], tiers: set[str], everything: bool = False) -> None:
    """A bucket larger than those that were trained from the start (if any were) goes where it belongs."""
    results = []
    for settings in every:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 300), torch.nn.Linear(300, 8))
        frozen = model if everything else model[0]
        frozen.requires_grad_(False)
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
        for step in range(1 if everything else 0, 3):
            if step == 1:
                frozen.requires_grad_(True)
            batch = torch.randn(2, 512, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            engine.backward(engine(batch.to(engine._runtime.buckets[0].dtype)).float().square().mean())
            engine.step()
        results.append(collect(engine, []))
        if settings is not every[0]:
            assert {master.tier.value for master in engine._runtime.masters} == tiers
            wrong = [row for row in results[-1].rows if row[1] != row[2]]
            assert not wrong, wrong
        engine.destroy()
    for part in ("masters", "compute"):
        assert_states_equal(getattr(results[1], part), getattr(results[0], part))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_bucket_that_is_unfrozen_late(device: str, tmp_path: Path) -> None:
    plain = config(3, precision="bf16")
    moved = config(3, precision="bf16", **offload(device, "none", tmp_path), sub_group_size=1 << 20)
    tier = {"cpu": "host", "nvme": "file"}[device]
    run_ranks(unfrozen_late, 2, [plain, moved], {tier})
    run_ranks(unfrozen_late, 2, [plain, moved], {tier}, everything=True)
    if device == "cpu":  # what is unfrozen comes first in the model, but what is there has its share already
        moved["zero_optimization"]["offload_optimizer"]["ratio"] = 0.01
        run_ranks(unfrozen_late, 2, [plain, moved], {tier, "device"})


# Parameters without a gradient stay as they are, whatever else of their bucket is updated, in every tier.


# Which parameters step after step uses. What is frozen from step 3 on stays so; experts differ from rank to rank.
STEPS = ("weight", "weight gain", "weight expert", "gain expert", "gain")
FROZEN_FROM = 3


class Mixed(nn.Module):
    """One bucket, in which whole chunks of an update get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((70, 70), 0.01))
        self.gain = nn.Parameter(torch.full((9000,), 2.0))
        for number in range(3):
            self.register_parameter(f"expert{number}", nn.Parameter(torch.full((30,), 3.0 + number)))

    def forward(self, x: torch.Tensor, used: str, rank: int) -> torch.Tensor:
        total = x.sum() * 0
        if "weight" in used and self.weight.requires_grad:
            total = total + (x.to(self.weight.dtype) @ self.weight).float().square().mean()
        if "gain" in used:
            total = total + (self.gain.float().square() * x.mean()).mean()
        if "expert" in used:
            total = total + (getattr(self, f"expert{rank}").float() * x.mean()).sum()
        return total


def train_uneven(settings: dict[str, Any], elsewhere: bool = False) -> list[list[torch.Tensor]]:
    """Body of a rank: the compute and master values after every step."""
    if elsewhere:
        with Elsewhere():
            return train_uneven(settings)
    torch.manual_seed(1)
    model = Mixed()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    runtime, seen = engine._runtime, []
    idle = count_idle_chunks(engine)
    assert len(runtime.buckets) == 1
    for step, used in enumerate(STEPS):
        if step == FROZEN_FROM:
            model.weight.requires_grad_(False)
        loss = engine(torch.randn(4, 70) + dist.get_rank(), used, dist.get_rank())
        engine.backward(loss)
        engine.step()
        seen.append([loss.detach()])
        seen[-1] += [bucket.shard.detach().clone() for bucket in runtime.buckets]
        seen[-1] += [master.flat.detach().clone() for master in runtime.masters]
    engine.destroy()
    assert not idle
    return seen


def count_idle_chunks(engine: Any) -> list[Any]:
    """Collects the chunks that travel although nothing in them is updated."""
    updater, idle = engine.inspect().updater._chunks, []
    update = updater._update

    def counted(chunk: Any, *others: Any) -> list[slice]:
        updated = update(chunk, *others)
        idle.extend([] if updated else [chunk])
        return updated

    updater._update = counted
    return idle


def train_each_unused(every: list[tuple[dict[str, Any], bool]]) -> list[list[list[torch.Tensor]]]:
    return [train_uneven(*each) for each in every]


def settings_of(stage: int, precision: str, optimizer: str, **zero: Any) -> dict[str, Any]:
    made = config(stage, precision=precision, sub_group_size=4096, **zero)
    made["optimizer"] = {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.1}}
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_home(ranks: int, tmp_path: Path) -> None:
    """Each cell of tiers, and those of an accelerator with results that go up, against training without offload."""
    kinds = [("bf16", "AdamW"), ("fp32", "SGD"), ("bf16", "SGD")]
    plain = {(stage, kind): (settings_of(stage, *kind), False) for stage in (2, 3) for kind in kinds}
    cells: dict[tuple[Any, ...], tuple[dict[str, Any], bool]] = {}
    for number, (stage, optimizer, param) in enumerate(CELLS):
        if stage < 4 - ranks:
            continue
        kind = kinds[(number + ranks) % len(kinds)]
        sections = offload(optimizer, param, tmp_path, pipelined=number % 2 == 0)
        cells[(stage, kind, optimizer, param, "here")] = (settings_of(stage, *kind, **sections), False)
        if optimizer != "none":
            kind = ("bf16", kind[1])
            cells[(stage, kind, optimizer, param, "elsewhere")] = (settings_of(stage, *kind, **sections), True)
    for got in run_ranks(train_each_unused, ranks, [*plain.values(), *cells.values()], timeout=240):
        expected = dict(zip(plain, got, strict=False))
        for cell, trained in zip(cells, got[len(plain) :], strict=True):
            assert_states_equal({cell: trained}, {cell: expected[cell[:2]]})
