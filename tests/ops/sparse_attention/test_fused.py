"""The layout as ``flex_attention`` takes it, run by that function as it is written, without a compiled kernel.

Gradients are compared on a GPU (``tests/gpu/test_operations.py``), since it has none on the CPU.
"""

import pytest
import torch

from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    VariableSparsityConfig,
    compile_layout,
    fused,
)
from tests.ops.sparse_attention.definitions import fused_beside_dense

HEADS = 3
PATTERNS = {
    "blocks smaller than a tile": (FixedSparsityConfig(HEADS, 16), 384),
    "blocks that no tile is a multiple of, heads that differ": (BigBirdSparsityConfig(HEADS, 24, True, 2), 312),
    "blocks larger than a tile": (FixedSparsityConfig(HEADS, 192, num_local_blocks=1), 576),
    "rows that see nothing": (
        VariableSparsityConfig(HEADS, 32, local_window_blocks=[], global_block_indices=[2], attention="unidirectional"),
        256,
    ),
}


@pytest.fixture(autouse=True)
def _is_not_compiled(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(fused, "_kernel", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_are_those_of_masked_dense_attention(pattern, is_causal, is_biased):
    config, length = PATTERNS[pattern]
    found, expected = fused_beside_dense(config, length, torch.float32, "cpu", is_causal=is_causal, is_biased=is_biased)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_tiles_are_hidden_shown_whole_or_masked():
    layout = torch.zeros(1, 16, 16)  # blocks of 32: four of them on a tile's side
    layout[0, :4, :4] = 1  # a whole tile
    layout[0, 4, 0] = 1  # a part of the tile below it
    layout[0, 8:16, 8:16] = 1  # four whole tiles
    plan = compile_layout(layout, 32)
    mask = fused.block_mask(plan, is_causal=False)
    assert mask.kv_num_blocks.flatten().tolist() == [0, 1, 0, 0]
    assert mask.full_kv_num_blocks.flatten().tolist() == [1, 0, 2, 2]
    causal = fused.block_mask(plan, is_causal=True)
    assert causal.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]  # the diagonal's tiles, and the part
    assert causal.full_kv_num_blocks.flatten().tolist() == [0, 0, 0, 1]
    assert fused.block_mask(plan, is_causal=True) is causal


def test_an_unfilled_last_tile_is_masked():
    plan = compile_layout(torch.ones(1, 3, 3), 64)
    mask = fused.block_mask(plan, is_causal=False)
    assert mask.full_kv_num_blocks.flatten().tolist() == [1, 0]
    assert mask.kv_num_blocks.flatten().tolist() == [1, 2]


def test_what_is_missing_for_a_kernel_is_named(monkeypatch):
    lines = []
    monkeypatch.setattr(fused, "warn_once", lambda _key, line: lines.append(line))
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    assert not fused._can_compile.__wrapped__()
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert not fused._can_compile.__wrapped__()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(fused.shutil, "which", lambda name: name == "gcc" or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert not fused._can_compile.__wrapped__()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fused._can_compile.__wrapped__()
    assert ["triton is not" in lines[0], "(no-such-compiler)" in lines[1], "older" in lines[2]] == [True] * 3
    assert len(lines) == 3
