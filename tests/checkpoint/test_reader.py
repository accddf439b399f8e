"""Checkpoints of cut parameters: tiles of any tiling, written in slices by any ranks, are read into any other."""

import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint import inspect, reader
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.format import COMPUTE, MASTER, Manifest
from deepspeed.checkpoint.plan import fills, match
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import StateDictSource, Wanted
from deepspeed.checkpoint.writer import BucketRun, FileWriter
from deepspeed.errors import CheckpointError
from deepspeed.zero.tiling.layout import bucket_layout
from deepspeed.zero.tiling.tiles import Tile, TilePart
from tests.checkpoint.whole import read_whole
from tests.zero.tiling.test_tiles import SHAPES, tilings

PADDING = 7.0


def values_of(tile: Tile, whole: torch.Tensor) -> torch.Tensor:
    """A tile of ``whole``, flattened, with something in its padding."""
    out = torch.full(tile.shape, PADDING, dtype=whole.dtype)
    for region in tile.regions:
        out[region.in_tile] = whole[region.in_whole]
    return out.view(-1)


def write(folder: Path, coordinates: list[list[Tile]], wholes: dict[str, torch.Tensor], ranks: int, facts=None) -> None:
    """A checkpoint as ranks write it: for each model coordinate its bucket, cut over ``ranks``, each its own file."""
    folder.mkdir(exist_ok=True)
    buckets, files = [], []
    with FileWriter(folder) as writer:
        for number, tiles in enumerate(coordinates):
            layout = bucket_layout(number, tiles, dtype="bfloat16", trainable=True, num_slices=ranks)
            buckets.append(layout)
            flat = torch.zeros(layout.numel)
            for tile, start in zip(layout.tiles, layout.starts, strict=True):
                flat[start : start + tile.numel] = values_of(tile, wholes[tile.logical])
            for rank in range(ranks if layout.numel else 0):
                low, high = layout.slice_bounds(rank)
                name = f"rank{number:05d}-{rank}.safetensors"
                files.append(
                    writer.write_runs(name, MASTER, [BucketRun(number, low, high, (flat[low:high],), flat.dtype)])
                )
    (folder / "manifest.json").write_bytes(Manifest(tuple(buckets), tuple(files), facts or {}).encode())


def expected(tile: Tile, whole: torch.Tensor, same: bool) -> torch.Tensor:
    """What a reader of ``tile`` finds: padding is that of the writer only where that wrote this very tile."""
    found = values_of(tile, whole)
    if not same:
        nowhere = torch.ones(tile.shape, dtype=torch.bool)
        for region in tile.regions:
            nowhere[region.in_tile] = False
        found[nowhere.view(-1)] = 0.0
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_tiling_reads_any_other(data):
    shape = data.draw(SHAPES)
    written = data.draw(tilings(shape))
    whole = torch.randn(shape)
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), [[tile] for tile in written], {"p": whole}, data.draw(st.integers(1, 3)))
        with CheckpointReader(Path(place)) as source:
            assert source.parameters["p"].shape == shape
            for tile in [*data.draw(tilings(shape)), *written, None]:
                requested = Tile("p", shape) if tile is None else tile
                start, stop = sorted(data.draw(st.integers(0, requested.numel)) for _ in range(2))
                out = torch.full((stop - start,), float("nan"))
                if not prod(shape):
                    continue
                wanted = Wanted(MASTER, "p", start, stop, tile)
                source.check([wanted])
                source.read(wanted, out)
                same = any(requested.holds_same(other) for other in written)
                assert torch.equal(out, expected(requested, whole, same)[start:stop])


QKV = [TilePart.cut("qkv", (12, 4), 0, [(first, first + 2) for first in (low, low + 4, low + 8)]) for low in (0, 2)]
ROWS = TilePart.cut("wte", (7, 4), 0, [(0, 4)]), TilePart.cut("wte", (7, 4), 0, [(4, 7)])
COLUMNS = TilePart.cut("out", (5, 9), 1, [(0, 5)]), TilePart.cut("out", (5, 9), 1, [(5, 9)])
WHOLES = {"qkv": (12, 4), "wte": (7, 4), "out": (5, 9), "norm": (4,)}


def model(coordinate: int) -> list[Tile]:
    """What a tensor-parallel rank of two has: packed heads, a rounded vocabulary, uneven columns, and what is whole."""
    tiles = [
        Tile("block.qkv", (6, 4), part=QKV[coordinate]),
        Tile("wte", (4, 4), part=ROWS[coordinate]),
        Tile("out", (5, 5 - coordinate), part=COLUMNS[coordinate]),
    ]
    return [*tiles, Tile("norm", (4,))] if coordinate == 0 else tiles  # whole copies are written once


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(5)
    wholes = {name: torch.randn(shape) for name, shape in WHOLES.items()}
    write(tmp_path, [model(0), model(1)], wholes, 2)
    return tmp_path, wholes


def test_consolidation_and_inspection_show_whole_parameters(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    state = get_fp32_state_dict_from_zero_checkpoint(folder[0])
    assert set(state) == set(WHOLES)
    assert all(torch.equal(state[name], folder[1][name]) for name in WHOLES)
    assert inspect.main([str(folder[0]), "--verify", "-p"]) == 0
    shown = capsys.readouterr().out
    for text in ("3 parameters into up to 2 tiles each", "(12, 4)", "2 tiles: (6, 4) of 3 regions", "(5, 5), (5, 4)"):
        assert text in shown, text


def test_each_slice_takes_what_it_needs(folder):
    """Two model coordinates with three ranks each, from two with two: the plan and the reader together."""
    with CheckpointReader(folder[0]) as source:
        for coordinate in range(2):
            layout = bucket_layout(0, model(coordinate), dtype="float32", trainable=True, num_slices=3)
            shapes = {tile.logical: tile.global_shape for tile in layout.tiles}
            matches, _, difference = match(source, shapes, {}, {})
            assert not difference.missing and not difference.shapes
            for rank in range(3):
                out = torch.zeros(layout.slice_numel)
                for entry in fills(layout, rank, matches, None):
                    source.read(entry.wanted, out[entry.start : entry.stop])
                for fragment in layout.fragments(rank):
                    tile = layout.tiles[fragment.tile]
                    found = expected(tile, folder[1][tile.logical], True)[fragment.in_tile]
                    assert torch.equal(out[fragment.in_slice], found)


def test_a_full_state_dict_fills_tiles(folder):
    source = StateDictSource(folder[1])
    for tile in (*model(0), *model(1)):
        out = torch.full((tile.numel,), 3.0)
        source.read(Wanted(COMPUTE, tile.logical, 0, tile.numel, tile), out)
        assert torch.equal(out, expected(tile, folder[1][tile.logical], False))


def test_a_rank_reads_about_its_share(tmp_path, monkeypatch):
    """Columns of wide rows: half of each row is half of the bytes. Narrow ones are read in windows, not one by one."""
    whole = {"w": torch.randn(64, 4096), "v": torch.randn(512, 8)}
    write(tmp_path, [[Tile("w", (64, 4096)), Tile("v", (512, 8))]], whole, 2)
    requested: list[int] = []
    plain = reader._read_at

    def counted(descriptor, out, offset):
        requested.append(len(out))
        return plain(descriptor, out, offset)

    monkeypatch.setattr(reader, "_read_at", counted)
    with CheckpointReader(tmp_path, verify=False) as source:
        for name, limit, calls in (("w", 64 * 2048 * 4, 65), ("v", 512 * 8 * 4, 2)):
            rows, width = whole[name].shape
            tile = Tile(name, (rows, width // 2), part=TilePart.cut(name, (rows, width), 1, [(width // 2, width)]))
            out = torch.empty(tile.numel)
            requested.clear()
            source.read(Wanted(MASTER, name, 0, tile.numel, tile), out)
            assert torch.equal(out, values_of(tile, whole[name]))
            assert sum(requested) <= limit and len(requested) <= calls


def test_heads_that_two_ranks_hold_are_read_once(tmp_path):
    """Fewer key heads than ranks: different tiles with an equal region; overlaps of other kinds are damage."""
    whole = {"kv": torch.randn(6, 2)}
    shared = [TilePart.cut("kv", (6, 2), 0, [(low, low + 2), (4, 6)]) for low in (0, 2)]
    write(tmp_path, [[Tile("kv", (4, 2), part=part)] for part in shared], whole, 1)
    with CheckpointReader(tmp_path) as source:
        assert torch.equal(read_whole(source, "kv"), whole["kv"])
    odd = [TilePart.cut("kv", (6, 2), 0, [(0, 4)]), TilePart.cut("kv", (6, 2), 0, [(2, 6)])]
    write(tmp_path / "odd", [[Tile("kv", (4, 2), part=part)] for part in odd], whole, 1)
    with pytest.raises(CheckpointError, match="overlap at"):
        CheckpointReader(tmp_path / "odd")


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        ([[Tile("w", (4,))], [Tile("w", (4,))]], "occurs twice"),
        ([[Tile("w", (2,), part=TilePart.cut("w", (4,), 0, [(0, 2)]))], [Tile("w", (4,))]], "overlap at"),
        ([[Tile("w", (2,), part=TilePart.cut("w", (4,), 0, [(0, 2)]))]], "not complete"),
        (
            [
                [Tile("w", (2,), part=TilePart.cut("w", (4,), 0, [(0, 2)]))],
                [Tile("w", (2,), part=TilePart.cut("w", (5,), 0, [(2, 4)]))],
            ],
            "disagree about its shape",
        ),
    ],
)
def test_tiles_that_make_no_parameter_are_refused(tiles, words, tmp_path):
    write(tmp_path, tiles, {"w": torch.zeros(5)}, 1)
    with pytest.raises(CheckpointError, match=words):
        CheckpointReader(tmp_path)
