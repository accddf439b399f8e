"""Checkpoints of the original package: weights, masters, moments, step and schedule, at any new topology."""

import contextlib
import json
import os
import random
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint, open_source
from deepspeed.checkpoint.directory import Format, find
from deepspeed.checkpoint.source import Wanted
from deepspeed.checkpoint.upstream.content import stage_1_and_2, stage_3
from deepspeed.checkpoint.upstream.files import load
from deepspeed.checkpoint.upstream.slices import whole_of
from deepspeed.errors import CheckpointError
from tests.checkpoint.fixtures.make import FIXTURES, PIPELINES
from tests.checkpoint.training import fragments, joined
from tests.checkpoint.upstream_run import build, train
from tests.harness import assert_states_equal, run_ranks

HERE = Path(__file__).resolve().parents[1] / "fixtures"
SHARDED = [name for name, made in FIXTURES.items() if made[1] > 0]


@pytest.fixture
def unpack(tmp_path):
    def unpacked(name: str) -> Path:
        folder = tmp_path / name
        with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
            archive.extractall(folder)
        return folder

    return unpacked


def tag_of(name: str) -> str:
    return "tag_universal" if FIXTURES[name][4] else "tag"


def expected_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the original package's own consolidation gave; without frozen ones at stage 1, as that leaves them out."""
    held = json.loads((folder / "weights.json").read_text())
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in held.items()}


@pytest.mark.parametrize("name", [name for name in SHARDED if FIXTURES[name][3] != "fp32-accumulation"])
def test_weights_are_those_of_the_original_consolidation(name, unpack):
    folder = unpack(name)
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag_of(name))
    assert state["seen"].dtype == torch.int64
    expected = expected_weights(folder)
    assert {"embed.weight", "head.weight", "norm.bias", "mean"} <= set(expected) <= set(state)
    for key, values in expected.items():
        assert_states_equal(state[key].double().flatten(), values)
    assert state["head.weight"] is state["embed.weight"]
    assert {"frozen.weight", "frozen.bias"} <= set(state)


def load_and_train(folder: str, tag: str, stages: tuple[int, ...], precision: str):
    """What engines of this package hold after loading, and their next losses."""
    report = {}
    for stage in stages:
        run = build(stage, precision, seed=9)
        train(run, range(1), comm.get_rank(), comm.get_world_size())
        path, client_state = run.load_checkpoint(folder, tag=tag)
        assert path == os.path.join(folder, tag)
        assert client_state["note"] == "hello" and client_state["epoch"] == 2
        assert run.global_steps == 3 and run.global_samples == 12
        assert run.lr_scheduler.state_dict() == {"last_batch_iteration": 2}
        rates = {group["lr"] for group in run.basic_optimizer.param_groups}
        decays = [group["weight_decay"] for group in run.basic_optimizer.param_groups]
        held = fragments(run)
        losses = train(run, range(3, 5), comm.get_rank(), comm.get_world_size())
        scale = run.optimizer.loss_scale
        report[stage] = held, losses, rates, decays, int(run.module.seen), scale
    return report


def check_loaded(name: str, folder: Path, ranks: int, stages: tuple[int, ...]) -> None:
    _, stage, precision, _, _ = FIXTURES[name]
    written = FIXTURES[name][0]
    results = run_ranks(load_and_train, ranks, str(folder), tag_of(name), stages, precision)
    source = open_source(folder, tag_of(name))
    then = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(written)]
    original = [sum(values) / written for values in zip(*then, strict=True)]
    for reading in stages:
        parts = [result[reading] for result in results]
        held = joined([part[0] for part in parts])
        for parameter, saved in source.parameters.items():
            for kind in saved.kinds:
                values = torch.empty(saved.numel, dtype=saved.kinds[kind])
                source.read(Wanted(kind, parameter, 0, saved.numel), values)
                key = f"{kind.replace('optimizer.', 'state.')}/{parameter}"
                assert_states_equal(held[key], values)
            if "optimizer.exp_avg" in saved.kinds:
                assert held[f"state.step/{parameter}"].item() == 3
            elif stage > 0:
                assert saved.is_frozen
        losses = [sum(values) / ranks for values in zip(*(part[1] for part in parts), strict=True)]
        assert losses == pytest.approx(original, rel=2e-2 if precision != "fp32" else 1e-5)
        _, _, rates, decays, _, scale = parts[0]
        if stage > 0 and FIXTURES[name][3] != "elastic":
            assert max(rates) == min(rates) == pytest.approx(0.0063357645) and decays == [0.1, 0.0]
        assert precision != "fp16" or scale >= 256
    if stage > 0:
        trained = {name for name, saved in source.parameters.items() if "optimizer.exp_avg_sq" in saved.kinds}
        assert trained == {name for name, saved in source.parameters.items() if not saved.is_frozen}
        assert len(trained) == 7


@pytest.mark.parametrize("name", SHARDED)
def test_training_continues_from_it(name, unpack):
    """At another topology: the other number of ranks, stages on either side."""
    ranks = {1: 2, 2: 1}[FIXTURES[name][0]]
    check_loaded(name, unpack(name), ranks, (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1-stage2-bf16", "2-stage2-bf16", "2-stage3-bf16", "2-stage3-universal"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_continues_at_any_topology(name, ranks, unpack):
    check_loaded(name, unpack(name), ranks, (0, 1, 2, 3))


@pytest.mark.parametrize("name", ["1-stage0-fp32", "1-stage0-bf16"])
def test_stage_0(name, unpack):
    check_loaded(name, unpack(name), 2, (0, 2))


@pytest.mark.parametrize("name", ["1-stage1-bf16", "2-stage2-bf16", "2-stage3-fp16", "2-stage2-universal"])
def test_conversion_to_our_format(name, unpack):
    folder = unpack(name)
    arguments = ["--input_folder", str(folder / tag_of(name)), "--output_folder", str(folder / "made")]
    options = ["--num_extract_workers", "2", "--num_merge_workers", "1", "--no_strict", "--inject_missing_state"]
    assert ds_to_universal.main([*arguments, *options, "--keep_temp_folder", "--output_format", "native"]) == 0
    assert (folder / "latest_universal").read_text() == "made"
    found = find(folder, None, prefer_universal=True)
    assert found is not None and found.tag == "made" and found.format is Format.OURS
    before, after = open_source(folder, tag_of(name)), open_source(folder, "made")
    assert {n: (p.shape, dict(p.kinds), p.is_frozen) for n, p in before.parameters.items()} == {
        n: (p.shape, dict(p.kinds), p.is_frozen) for n, p in after.parameters.items()
    }
    for parameter, saved in before.parameters.items():
        for kind, dtype in saved.kinds.items():
            one, other = torch.empty(saved.numel, dtype=dtype), torch.empty(saved.numel, dtype=dtype)
            before.read(Wanted(kind, parameter, 0, saved.numel), one)
            after.read(Wanted(kind, parameter, 0, saved.numel), other)
            assert_states_equal(other, one)
    results = run_ranks(load_and_train, 1, str(folder), "made", (2,), FIXTURES[name][2])
    original = run_ranks(load_and_train, 1, str(folder), tag_of(name), (2,), FIXTURES[name][2])
    assert_states_equal([list(part) for part in results[0].values()], [list(part) for part in original[0].values()])


def test_conversion_of_stage_0_prints_what_is_lost(unpack, capsys):
    """Its files do not say which optimizer state belongs to which parameter; only a model does."""
    folder = unpack("1-stage0-fp32")
    arguments = ["--input_folder", f"{folder}/tag", "--output_folder", f"{folder}/made"]
    assert ds_to_universal.main([*arguments, "--output_format", "native"]) == 0
    assert "optimizer states were left out" in capsys.readouterr().out
    assert_states_equal(
        dict(get_fp32_state_dict_from_zero_checkpoint(folder, "made")),
        dict(get_fp32_state_dict_from_zero_checkpoint(folder, "tag")),
    )


def test_conversion_of_our_own_format_is_another_name(tmp_path):
    run_ranks(save_ours, 1, str(tmp_path))
    arguments = ["--input_folder", f"{tmp_path}/a", "--output_folder", f"{tmp_path}/b", "--output_format", "native"]
    assert ds_to_universal.main(arguments) == 0
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    run_ranks(load_universal, 2, str(tmp_path))
    settings = SimpleNamespace(
        input_folder=f"{tmp_path}/a", output_folder=f"{tmp_path}/e", output_format="native", strict=True
    )
    assert ds_to_universal.main(settings) == 0 and (tmp_path / "e").is_dir()  # as programs call it
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        ds_to_universal.main(SimpleNamespace(input_folder=f"{tmp_path}/c", output_folder=f"{tmp_path}/d"))
    assert ds_to_universal.main(["--input_folder", f"{tmp_path}/c", "--output_folder", f"{tmp_path}/d"]) == 1
    assert not (tmp_path / "d").exists()


def save_ours(folder: str):
    run = build(2, "bf16")
    run.save_checkpoint(folder, tag="a")


def load_universal(folder: str):
    run = build(1, "bf16", checkpoint={"load_universal": True})
    assert run.load_checkpoint(folder)[0] == os.path.join(folder, "b")


def refused(folder: str, tag: str):
    run = build(1, "bf16")
    with pytest.raises(CheckpointError) as raised:
        run.load_checkpoint(folder, tag=tag)
    return str(raised.value)


@pytest.mark.parametrize("name", ["2-stage2-bf16", "2-stage3-bf16"])
def test_a_missing_rank_is_named(name, unpack):
    folder = unpack(name)
    (folder / "tag" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "1 optimizer-states files of 2 ranks" in refused_here(folder)
    (folder / "tag" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    if "stage3" in name:
        assert "optimizer-states files" in refused_here(folder)


def refused_here(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_source(folder, "tag")
    return str(raised.value)


def test_other_parallelism_is_refused(unpack):
    folder = unpack("2-stage2-bf16") / "tag"
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert "model-parallel" in refused_here(folder.parent)


class Harm:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_code_in_the_files_does_not_run(file, unpack):
    folder = unpack("2-stage2-bf16")
    torch.save({"module": {}, "optimizer_state_dict": Harm(str(folder / "harmed"))}, folder / "tag" / file)
    assert "allow_pickled_objects" in refused_here(folder)
    (message,) = run_ranks(refused, 1, str(folder), "tag")
    assert file in message
    assert not (folder / "harmed").exists()


class Thing:
    """A caller's own class in the client state."""


def trusting(folder: str):
    run = build(1, "bf16")
    with pytest.raises(CheckpointError, match="allow_pickled_objects=True"):
        run.load_checkpoint(folder, tag="tag")
    return type(run.load_checkpoint(folder, tag="tag", allow_pickled_objects=True)[1]["thing"]).__name__


def test_objects_of_the_caller_on_request(unpack):
    folder = unpack("1-stage2-bf16")
    path = folder / "tag" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "thing": Thing()}, path)
    assert run_ranks(trusting, 1, str(folder)) == ["Thing"]


def test_a_layout_that_was_not_understood_is_not_loaded(unpack):
    """Masters that do not round to the 16-bit weights beside them."""
    folder = unpack("2-stage2-bf16")
    path = folder / "tag" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["module"]["norm.weight"] = state["module"]["norm.weight"] + 1
    torch.save(state, path)
    (message,) = run_ranks(refused, 1, str(folder), "tag")
    assert "'norm.weight'" in message and "16-bit" in message


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_walks_give_every_element_once(ranks):
    shapes = {"a": (3, 7), "b": (), "c": (40,), "d": (0, 4), "e": (1,)}
    numels = {"a": 21, "b": 1, "c": 40, "d": 0, "e": 1}
    total = sum(numels.values())
    length = -(-total // (2 * ranks)) * 2
    for stripped in (False, True):
        lengths = [max(min(length, total - rank * length), 0) if stripped else length for rank in range(ranks)]
        check_walk(stage_1_and_2(shapes, lengths, None, "here"), numels)
    gaps = [3, 3, 0, 0, 2]
    length = -(-(total + sum(gaps)) // (2 * ranks)) * 2
    check_walk(stage_1_and_2(shapes, [length] * ranks, gaps, "here"), numels)
    length = sum(-(-numel // ranks) for numel in numels.values())
    check_walk(stage_3(shapes, [length] * ranks, "here"), numels)
    with pytest.raises(CheckpointError):
        stage_3(shapes, [length + 1] * ranks, "here")
    with pytest.raises(CheckpointError):
        stage_1_and_2(shapes, [total // ranks - 1] * ranks, None, "here")
    with pytest.raises(CheckpointError):
        stage_1_and_2(shapes, [total + 3] * ranks, None, "here")


def check_walk(fragments: dict, numels: dict[str, int]) -> None:
    places = set()
    for name, numel in numels.items():
        covered = [index for e in fragments[name] for index in range(e.start, e.start + e.numel)]
        assert covered == list(range(numel)) and all(e.numel > 0 for e in fragments[name])
        places |= {(e.rank, e.offset + index) for e in fragments[name] for index in range(e.numel)}
    assert len(places) == sum(numels.values())


PEER = os.environ.get("UPSTREAM_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="UPSTREAM_PYTHON names no interpreter that has the original package")
@pytest.mark.parametrize("name", ["2-stage2-bf16", "2-stage3-bf16"])
def test_what_the_original_package_writes_now(name, tmp_path):
    from tests.checkpoint.fixtures.make import write

    write(str(PEER), tmp_path / name, name, 29891)
    check_loaded(name, tmp_path / name, 1, (1, 3))


def test_fixtures_are_small():
    assert sum(path.stat().st_size for path in HERE.glob("*.zip")) < 450_000


def test_fixtures_are_those_of_the_script():
    assert {path.stem for path in HERE.glob("*.zip")} == {*FIXTURES, *PIPELINES}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_file_of_the_older_format_is_named(tmp_path):
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"a": torch.ones(3)}, "steps": [1, 2.5, None]}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    load(path)
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] = generator.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            load(path)


def test_a_parameter_of_one_element_is_not_cut():
    assert whole_of("scale", [(), ()], {"tp_replicated_parameter_patterns": []}, "here").shape == ()
