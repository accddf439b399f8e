"""Runs whose parameters are cut over ranks save one checkpoint; it is read by runs that are cut otherwise, or not."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import deepspeed
from deepspeed.checkpoint import inspect
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.comm.job.job import define_group
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.zero.tiling.describe import put_in_group
from deepspeed.zero.tiling.parts import say_part
from deepspeed.zero.tiling.tiles import TilePart
from tests.harness import assert_states_equal, on_ranks, run_ranks

SHAPES = {"packed": (12, 5), "wide": (4, 9), "late": (7,), "norm": (6,)}
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


class Unit:
    """Two tensor-parallel ranks side by side, the others data-parallel."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        apart = [dist.new_group(list(ranks[first::2])) for first in range(2)]
        self.data, self.place = apart[dist.get_rank() % 2], dist.get_rank() % 2

    def get_data_parallel_group(self):
        return self.data

    def get_data_parallel_world_size(self):
        return dist.get_world_size() // 2

    def get_data_parallel_rank(self):
        return dist.get_rank() // 2

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_rank(self):
        return self.place

    def get_tensor_model_parallel_world_size(self):
        return 2

    def get_tensor_model_parallel_rank(self):
        return self.place


def cuts(how: str, place: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Dimension and intervals that a tensor-parallel rank holds."""
    if how == "rows":  # packed heads, uneven rows, a padded end
        packed = [(low + 2 * place, low + 2 * place + 2) for low in (0, 4, 8)]
        return {"packed": (0, packed), "wide": (0, [(3 * place, 3 + place)]), "late": (0, [(4 * place, 4 + 3 * place)])}
    bounds = {"packed": (1, 2, 5), "wide": (1, 5, 9), "late": (0, 1, 7)}
    return {name: (dim, [[(0, middle)], [(middle, end)]][place]) for name, (dim, middle, end) in bounds.items()}


class Cut(nn.Module):
    """Parameters in the parts of one rank, with the first values of the whole."""

    def __init__(self, how: str, place: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in SHAPES.items():
            whole = torch.randn(shape)
            if how == "whole" or name == "norm":
                self.register_parameter(name, nn.Parameter(whole))
                continue
            dim, intervals = cuts(how, place)[name]
            mine = torch.cat([whole.narrow(dim, low, high - low) for low, high in intervals], dim)
            if (how, name, place) == ("rows", "late", 1):
                mine = torch.cat([mine, torch.full((1,), 0.5)])  # rounded up to the length of the other rank's
            parameter = nn.Parameter(mine.contiguous())
            say_part(parameter, TilePart.cut(name, shape, dim, intervals))
            setattr(self, name, parameter)
        self.register_buffer("seen", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * parameter.float() ** 2).sum() for parameter in self.parameters())


def start(how: str, stage: int, seed: int = 1):
    unit = None if how == "whole" else Unit()
    model = Cut(how, 0 if unit is None else unit.place, seed)
    data = dist.get_world_size() // (1 if unit is None else 2)
    config = {
        "train_batch_size": data,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    return deepspeed.initialize(model=model, config=config, mpu=unit)[0]


def train(engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(torch.tensor(1.0 + step)))
        engine.step()


def held(engine) -> dict[str, tuple[TilePart | None, torch.Tensor]]:
    """What this rank's group has, as tiles."""
    tiles = {tile.name: tile for bucket in engine._runtime.layout.buckets for tile in bucket.tiles}
    return {f"{kind}/{name}": (tiles[name].part, value) for kind in KINDS for name, value in engine.iter_full(kind)}


def wholes(result: list[dict]) -> dict[str, torch.Tensor]:
    """Logical parameters and states from the tiles of all ranks."""
    made: dict[str, torch.Tensor] = {}
    for rank in result:
        for key, (part, value) in rank.items():
            if part is None:
                assert_states_equal(made.setdefault(key, value), value)
                continue
            whole = made.setdefault(key, torch.full(part.global_shape, float("nan")))
            for region in part.regions:
                whole[region.in_whole] = value[region.in_tile]
    assert not any(bool(value.isnan().any()) for value in made.values())
    return made


def write(folder: str, how: str, stage: int, tag: str):
    engine = start(how, stage)
    train(engine, 2)
    engine.save_checkpoint(folder, tag=tag, client_state={"note": tag})
    engine.save_16bit_model(folder, f"{tag}.safetensors")
    full = engine._consolidated_16bit_state_dict()
    assert (full is None) == (dist.get_rank() > 0)
    if full is not None:
        assert_states_equal(load_file(f"{folder}/{tag}.safetensors"), full)
    return held(engine)


def read(folder: str, how: str, stage: int, tags: list[str]):
    engine = start(how, stage, seed=9)
    train(engine, 1)
    found = {}
    for tag in tags:
        _, client = engine.load_checkpoint(folder, tag=tag)
        assert client["note"] == tag and engine.global_steps == 2
        found[tag] = held(engine)
    train(engine, 1)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cut"))
    result = run_ranks(write, 4, folder, "rows", 2, "rows")
    run_ranks(write, 2, folder, "whole", 1, "whole")
    return folder, wholes(result), result


def test_what_is_cut_is_saved_as_one_model(written, capsys):
    folder, expected, result = written
    state = get_fp32_state_dict_from_zero_checkpoint(folder, "rows")
    for name in SHAPES:
        assert_states_equal(state[name], expected[f"fp32/{name}"])
    weights = load_file(f"{folder}/rows.safetensors")
    assert_states_equal(weights.pop("seen"), torch.tensor(3.0))
    assert_states_equal(weights, {name: expected[f"fp32/{name}"].bfloat16() for name in SHAPES})
    manifest = json.loads((Path(folder) / "rows" / "manifest.json").read_text())["manifest"]
    rows = [row[0] for bucket in manifest["buckets"] for row in bucket["tiles"]]
    assert sorted(rows) == ["late", "late", "norm", "packed", "packed", "wide", "wide"]
    masters = sum(p[2] - p[1] for file in manifest["files"] if file["kind"] == "master" for p in file["pieces"])
    assert masters == sum(bucket["numel"] for bucket in manifest["buckets"])  # every element once
    assert inspect.main([folder, "-t", "rows", "--verify", "-p"]) == 0
    assert "3 parameters into up to 2 tiles each" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "how", "stage"), [(4, "columns", 3), (2, "whole", 1), (4, "rows", 1)])
def test_any_cut_reads_any_other(ranks, how, stage, written):
    folder, expected, saved = written
    result = run_ranks(read, ranks, folder, how, stage, ["rows", "whole"])
    assert_states_equal(wholes([rank["rows"] for rank in result]), expected)
    assert wholes([rank["whole"] for rank in result]).keys() == expected.keys()
    if how == "rows":  # the same tiles: their padding is as it was, too
        assert_states_equal(
            {key: value for key, (_, value) in result[1]["rows"].items()}, {k: v for k, (_, v) in saved[1].items()}
        )


@on_ranks(2)
def test_cut_parameters_without_a_mark_of_their_part_are_not_saved_as_copies(tmp_path) -> None:
    folder = str(tmp_path)
    model = nn.Linear(4, 4)
    model.weight.tensor_model_parallel = True
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    engine = deepspeed.initialize(model=model, config=config, mpu=Unit())[0]
    with pytest.raises(CheckpointError, match="'weight' is whole on rank 0 and again on rank 1.*partition_dim"):
        engine.save_checkpoint(folder)
    assert not list(Path(folder).iterdir())


class Expert(nn.Module):
    """What all ranks share, and one of two experts, which has the same name on every rank."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 3)
        experts = [nn.Linear(3, 2, bias=False) for _ in range(2)]
        self.expert = experts[number]
        say_part(self.expert.weight, TilePart.all_of(f"experts.{number}.weight", (2, 3)))
        put_in_group(self.expert.parameters(), "experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.first(x)).square().sum()


def _experts(folder: str, numbers: list[int], stage: int, seed: int, steps: int):
    """An engine whose rank holds one of ``numbers``, trained or loaded; what it has then."""
    ranks = range(len(numbers))
    define_group("experts", [[rank for rank in ranks if numbers[rank] == expert] for expert in range(2)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=Expert(numbers[dist.get_rank()], seed), config=config)[0]
    for step in range(steps):
        engine.backward(engine(torch.full((1, 3), 1.0 + step + dist.get_rank())))
        engine.step()
    if steps == 3:
        engine.save_checkpoint(folder, tag="experts")
        full = engine._consolidated_16bit_state_dict()
        assert full is None or {"experts.0.weight", "experts.1.weight", "first.bias"} < set(full)
    else:
        engine.load_checkpoint(folder, tag="experts")
    tiles = {tile.name: tile.logical for bucket in engine._runtime.layout.buckets for tile in bucket.tiles}
    return {f"{kind}/{tiles[name]}": value for kind in KINDS for name, value in engine.iter_full(kind)}


def test_experts_are_found_by_their_logical_names(tmp_path):
    saved = run_ranks(_experts, 4, str(tmp_path), [0, 1, 0, 1], 2, 1, 3)
    expected = {key: value for rank in saved for key, value in rank.items()}
    assert {"fp32/experts.0.weight", "fp32/experts.1.weight", "exp_avg/first.bias"} <= set(expected)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(state) == {"first.weight", "first.bias", "experts.0.weight", "experts.1.weight"}
    for stage, numbers in ((3, [1, 0]), (1, [0, 0, 1, 1])):
        for rank in run_ranks(_experts, len(numbers), str(tmp_path), numbers, stage, 7, 1):
            assert len(rank) == 9
            assert_states_equal(rank, {key: expected[key] for key in rank})


@on_ranks(1)
def test_a_part_that_does_not_fit_is_refused() -> None:
    model = nn.Linear(4, 4)
    say_part(model.weight, TilePart.cut("weight", (8, 4), 0, [(0, 5)]))
    with pytest.raises(DeepSpeedConfigError, match="tile 'weight'.*does not lie inside the shape"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1})
