"""Every legal pair of tiers at every stage trains bit for bit as without offload, at one and two ranks."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.harness import assert_states_equal, run_ranks
from tests.offload.training import Trained, config, train, train_each

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
