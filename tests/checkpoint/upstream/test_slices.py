"""Pipelines of the original package: layer files and universal folders, into any number of stages, copies and stages.

The fixtures were written by :mod:`tests.checkpoint.upstream_pipeline_run` under that package.
"""

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint, open_source
from deepspeed.checkpoint.source import Wanted
from deepspeed.checkpoint.upstream.files import load
from deepspeed.checkpoint.upstream.slices import INFO
from deepspeed.errors import CheckpointError
from tests.checkpoint.upstream_pipeline_run import build, train
from tests.harness import run_ranks

HERE = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.fixture
def unpack(tmp_path):
    def unpacked(name: str) -> Path:
        with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
            archive.extractall(tmp_path / name)
        return tmp_path / name

    return unpacked


def _continue(folder, tag, stages, stage, precision, **more):
    engine = build(stage, precision, stages, seed=9)
    path, client = engine.load_checkpoint(folder, tag=tag, **more)
    assert path is not None and client["note"] == "hello" and client["epoch"] == 2
    if not more:
        assert engine.global_steps == 3 and engine.global_samples == 24
        assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 2}
    held = {name: value.clone() for name, value in engine.iter_full("fp32")}
    copies = torch.distributed.get_world_size() // stages
    return held, train(engine, range(3, 5), copies)


@pytest.mark.parametrize(
    ("name", "tag", "ranks", "stages", "stage"),
    [
        ("pipe2-stage1-bf16", "tag", 1, 1, 2),
        ("pipe2-stage1-bf16", "tag_universal", 2, 2, 0),
        ("pipe2x2-stage1-fp32", "tag", 2, 2, 1),
        pytest.param("pipe2x2-stage1-fp32", "tag", 3, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_training_continues_from_it(name, tag, ranks, stages, stage, unpack):
    folder = unpack(name)
    precision = name.rsplit("-", 1)[1]
    more = {}
    if tag == "tag_universal":  # it leaves out frozen parameters and buffers
        more["load_module_strict"] = False
    results = run_ranks(_continue, ranks, str(folder), tag, stages, stage, precision, **more)
    source = open_source(folder, "tag")
    for held, losses in results:
        for parameter, value in held.items():
            if "frozen" in parameter and more:
                continue
            saved = source.parameters[parameter]
            kind = "master" if "master" in saved.kinds else "compute"
            expected = torch.empty(saved.numel, dtype=saved.kinds[kind])
            source.read(Wanted(kind, parameter, 0, saved.numel), expected)
            assert torch.equal(value.flatten(), expected.float()), parameter
        then = json.loads((folder / "losses0.json").read_text())
        assert losses == pytest.approx(then, rel=2e-2 if precision == "bf16" else 1e-5)
    names = {parameter for held, _ in results for parameter in held}
    assert names == set(source.parameters)


@pytest.mark.parametrize(("stages", "stage"), [(1, 2), (2, 0), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_moments_that_have_no_names(stages, stage, unpack):
    """ZeRO stage 0: the parameters of each stage's optimizer are told apart by their order in the model."""
    folder = unpack("pipe2-stage0-fp32")
    then = json.loads((folder / "losses0.json").read_text())
    for _, losses in run_ranks(_continue, stages, str(folder), "tag", stages, stage, "fp32"):
        assert losses == pytest.approx(then, rel=1e-6)


def test_weights_alone(unpack):
    """ZeRO stage 0: the tied layer is known by the model."""
    folder = unpack("pipe2-stage0-fp32")
    (held, _), *_ = run_ranks(_continue, 1, str(folder), "tag", 1, 1, "fp32", load_module_only=True)
    layer = torch.load(folder / "tag" / "layer_02-model_states.pt")
    assert torch.equal(held["2.up.weight"], layer["up.weight"])
    embedding = torch.load(folder / "tag" / "layer_00-model_states.pt")["weight"]
    assert torch.equal(held["tied_modules.embed.weight"], embedding)


def test_one_state_dict(unpack):
    folder = unpack("pipe2-stage1-bf16")
    state = get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
    universal = get_fp32_state_dict_from_zero_checkpoint(folder, "tag_universal")
    assert {"tied_modules.embed.weight", "1.frozen", "2.mean", "3.up.bias"} <= set(state)
    assert not any(name.startswith("0.") for name in state)
    trained = [name for name in state if "frozen" not in name and "mean" not in name]
    assert set(universal) == set(trained)
    assert all(torch.equal(universal[name], state[name]) for name in trained)
    layer = torch.load(folder / "tag" / "layer_03-model_states.pt")
    assert torch.equal(state["3.down.weight"].bfloat16(), layer["down.weight"])
    assert state["3.down.weight"].dtype == torch.float32


# How the blocks are cut over two tensor-parallel ranks, in the words of programs that save such pipelines.
CUTS = {
    "tp_replicated_parameter_patterns": [r"tied_modules\.", r"\d+\.norm\.", r"\d+\.down\.bias", r"\d+\.frozen"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
}


def _slice(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    if any(re.match(pattern, name) for pattern in CUTS["tp_replicated_parameter_patterns"]) or name.endswith("mean"):
        return whole.clone()
    return whole.chunk(2, dim=int(name.endswith("down.weight")))[rank].clone()


def _cut(tag: Path, info: dict | None) -> None:
    """Rewrites a folder of two stages as two tensor-parallel ranks of each stage would have written it."""
    for path in sorted(tag.glob("layer_*")):
        values, number = torch.load(path), int(path.name[6:8])
        for rank in range(2):
            # The first and the last layer are tied, and whole on both ranks.
            begins = "tied_modules.embed." if number in (0, 5) else f"{number}."
            held = {name: _slice(begins + name, value, rank) for name, value in values.items()}
            torch.save(held, tag / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        path.unlink()
    saved = {}
    for stage in range(2):
        model = load(tag / f"mp_rank_{stage:02d}_model_states.pt")
        optim = load(tag / f"bf16_zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt")["optimizer_state_dict"]
        (shapes,), state = model["param_shapes"], optim["base_optimizer_state"]
        flats = {"": optim["single_partition_of_fp32_groups"][0], **state["state"][0]}
        for rank in range(2):
            cut: dict[str, torch.Tensor] = {"step": flats["step"].clone()}
            for kind in ("", "exp_avg", "exp_avg_sq"):
                wholes = flats[kind].split([shape.numel() for shape in shapes.values()])
                parts = {
                    name: _slice(name, whole.view(shape), rank)
                    for (name, shape), whole in zip(shapes.items(), wholes, strict=True)
                }
                cut[kind] = torch.cat([part.flatten() for part in parts.values()])
            written = {
                "single_partition_of_fp32_groups": [cut.pop("")],
                "base_optimizer_state": {**state, "state": {0: cut}},
                "partition_count": [1],
                "group_paddings": [0],
            }
            own = {name: part.shape for name, part in parts.items()}
            content = {**model, "param_shapes": [own], "mp_world_size": 4} | ({INFO: info} if info else {})
            saved[2 * stage + rank] = content, {"optimizer_state_dict": written}
    for place, (model, optim) in saved.items():
        torch.save(model, tag / f"mp_rank_{place:02d}_model_states.pt")
        torch.save(optim, tag / f"bf16_zero_pp_rank_0_mp_rank_{place:02d}_optim_states.pt")


def _everything(folder: Path, tag: str = "tag") -> dict[tuple[str, str], torch.Tensor]:
    source, found = open_source(folder, tag), {}
    for name, parameter in source.parameters.items():
        for kind, dtype in parameter.kinds.items():
            found[name, kind] = torch.empty(parameter.numel, dtype=dtype)
            source.read(Wanted(kind, name, 0, parameter.numel), found[name, kind])
    return found


def test_layers_that_tensor_parallel_ranks_cut(unpack):
    """Weights, masters and moments are those of the same pipeline before it was cut."""
    folder = unpack("pipe2-stage1-bf16")
    expected = _everything(folder)
    _cut(folder / "tag", CUTS)
    found = _everything(folder)
    assert found.keys() == expected.keys() and ("1.up.weight", "master") in found
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    (folder / "tag" / "layer_02-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="tensor-parallel rank 1 lacks the file of layer 2"):
        open_source(folder, "tag")


def test_the_universal_form_of_layers_that_tensor_parallel_ranks_cut(unpack):
    """Parameters lie whole there; the model states of four ranks tell the shapes of their slices."""
    folder = unpack("pipe2-stage1-bf16")
    expected, universal = _everything(folder, "tag_universal"), folder / "tag_universal"
    for path in sorted(universal.glob("mp_rank_*"), reverse=True):
        model, stage = load(path), int(path.name.split("_")[2])
        for rank in range(2):
            shapes = [
                {name: _slice(name, torch.empty(shape, device="meta"), rank).shape for name, shape in group.items()}
                for group in model["param_shapes"]
            ]
            content = {**model, "param_shapes": shapes, INFO: CUTS, "checkpoint_parallel_dimensions": {"tp_degree": 2}}
            torch.save(content, universal / f"mp_rank_{2 * stage + rank:02d}_model_states.pt")
    found = _everything(folder, "tag_universal")
    assert found.keys() == expected.keys() and ("1.up.weight", "master") in found
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    (universal / "mp_rank_03_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="of 3 ranks, which 2 tensor-parallel ranks of each stage cannot have"):
        _everything(folder, "tag_universal")


def test_cut_layers_without_a_description_are_refused(unpack):
    folder = unpack("pipe2-stage1-bf16")
    _cut(folder / "tag", None)
    with pytest.raises(CheckpointError, match="does not describe how"):
        open_source(folder, "tag")
