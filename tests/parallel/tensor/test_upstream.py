"""Folders that the original package wrote with tensor parallelism, as ranks wrote them and converted, are read."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.upstream.content import CheckpointValues, Values
from deepspeed.checkpoint.upstream.slices import join_slices
from deepspeed.errors import CheckpointError
from tests.ecosystem.support import needs_transformers
from tests.harness import run_ranks
from tests.parallel.tensor import upstream_run

HERE = Path(__file__).resolve().parent / "fixtures"


def _unpack(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder


TAGS = [(name, "tag") for name in upstream_run.FIXTURES] + [("tensor2-stage1", "tag_universal")]


@needs_transformers
@pytest.mark.parametrize(("name", "tag"), TAGS)
def test_weights_are_what_the_original_package_had(name, tag, tmp_path):
    folder = _unpack(name, tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    expected = json.loads((folder / "weights.json").read_text())
    assert set(state) == set(expected)
    shapes = {key: value.shape for key, value in upstream_run.model().state_dict().items()}
    for key, values in expected.items():
        assert state[key].shape == shapes[key]
        assert torch.equal(state[key].bfloat16().float().flatten(), torch.tensor(values)), key


def _go_on(folder: str, tag: str, size: int, stage: int):
    """Losses of the steps after it, and after another update."""
    config = upstream_run.config(stage) | {"tensor_parallel": {"autotp_size": size}}
    engine = deepspeed.initialize(model=upstream_run.model(), config=config)[0]
    engine.load_checkpoint(folder, tag=tag)
    assert engine.global_steps == 3
    losses = []
    for step in range(3, 6):
        loss = upstream_run.loss_of(engine, step, engine.get_data_parallel_rank())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


@needs_transformers
@pytest.mark.parametrize(
    ("name", "tag", "ranks", "size", "stage"),
    [
        ("tensor2-stage1", "tag", 2, 2, 3),
        ("tensor2-stage1", "tag_universal", 1, 1, 1),
        ("tensor2x2-stage3", "tag", 2, 1, 2),
        pytest.param("tensor2x2-stage3", "tag", 4, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_training_continues_from_it_with_any_cut(name, tag, ranks, size, stage, tmp_path):
    folder = _unpack(name, tmp_path)
    found = run_ranks(_go_on, ranks, str(folder), tag, size, stage)[0]
    written = upstream_run.FIXTURES[name][0]
    then = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(0, written, 2)]
    expected = [sum(values) / len(then) for values in zip(*then, strict=True)][3:]
    if ranks // size == len(then):
        assert found == pytest.approx(expected, rel=2e-2)
    else:  # fewer data-parallel ranks see a part of the samples: the first loss alone is of the same weights
        assert found[0] == pytest.approx(then[0][3], rel=2e-2)


def _content(values: dict[str, torch.Tensor]) -> CheckpointValues:
    from deepspeed.checkpoint.source import TrainingState

    content = CheckpointValues(TrainingState({}, 1))
    for name, value in values.items():
        content.shapes[name] = tuple(value.shape)
        content.put("master", name, Values.whole(value))
    return content


INFO = {
    "tp_replicated_parameter_patterns": [r".*norm"],
    "parameter_to_average_patterns": [r".*drift"],
    "parameter_with_row_parallelism_patterns": [r".*row"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gated"],
    "parameter_with_sub_params": [
        {"patterns": [r".*packed"], "shape": [(4, 2, 2), 3], "partition_dim": 0},
        {"patterns": [r".*viewed"], "shape": [3, 4, -1], "partition_dim": 1},
    ],
    "vocabulary_parameter_patterns": [r".*words"],
    "original_vocab_size": 5,
}


def test_patterns_of_megatron_like_programs():
    whole = {name: torch.randn(8, 3) for name in ("column", "gated", "packed", "words")}
    whole |= {"row": torch.randn(3, 8), "norm": torch.randn(3), "viewed": torch.randn(12, 3)}
    mine: list[dict[str, torch.Tensor]] = []
    for rank in range(2):
        half = slice(4 * rank, 4 * rank + 4)
        gated = torch.cat([part.chunk(2)[rank] for part in whole["gated"].chunk(2)])
        packed = torch.cat([part.chunk(2)[rank] for part in whole["packed"].split([4, 2, 2])])
        viewed = whole["viewed"].view(3, 4, 3)[:, 2 * rank : 2 * rank + 2].reshape(6, 3)
        mine.append(
            {"column": whole["column"][half], "row": whole["row"][:, half], "gated": gated, "packed": packed}
            | {"words": whole["words"][half], "norm": whole["norm"], "viewed": viewed}
            | {"drift": torch.full((2,), float(rank))}
        )
    joined = join_slices([_content(values) for values in mine], INFO, "here")
    expected = whole | {"words": whole["words"][:5], "drift": torch.full((2,), 0.5)}
    assert set(joined.shapes) == set(expected)
    for name, value in expected.items():
        assert joined.shapes[name] == tuple(value.shape), name
        found = torch.empty(value.numel())
        assert joined.values["master"][name].read(0, value.numel(), found)
        assert torch.equal(found.view(value.shape), value), name
        some = torch.empty(1)
        assert joined.values["master"][name].read(1, 2, some) and some == value.flatten()[1]


def test_slices_that_do_not_fit_together_are_refused():
    ones = [_content({"norm": torch.zeros(3)}), _content({"norm": torch.ones(3)})]
    with pytest.raises(CheckpointError, match="should have the same master of 'norm', but they differ"):
        join_slices(ones, INFO, "here")
    with pytest.raises(CheckpointError, match="does not describe how their slices fit together"):
        join_slices(ones, None, "here")
    run = {"shape": [3], "source": [4, [1]], "dest": [0, [1]], "locations": [1]}
    ranks = {0: {"shard_shape": [3], "pieces": []}, 1: {"shard_shape": [3], "pieces": [run]}}
    beyond = {"affine_map": {"params": {"^norm$": {"logical_shape": [6], "ranks": ranks}}}}
    with pytest.raises(CheckpointError, match=r"do not make up \(6,\)"):
        join_slices(ones, beyond, "here")
    with pytest.raises(CheckpointError, match="only some of the model-parallel ranks have the parameter 'other'"):
        join_slices([ones[0], _content({"norm": torch.ones(3), "other": torch.ones(1)})], INFO, "here")
