"""Offload with what it must work with: checkpoints, other optimizers, several engines, changing parameters, memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.errors import RanksFailed
from tests.harness.toy_models import awkward, param_groups
from tests.offload.test_cells import offload
from tests.offload.training import collect, config, make_engine, train, train_some


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
