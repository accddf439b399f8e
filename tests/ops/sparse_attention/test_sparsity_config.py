import random

import pytest
import torch

from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    MatMul,
    Softmax,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    attend,
    compile_layout,
)
from deepspeed.ops.sparse_attention.sparsity_config import DenseSparsityConfig
from tests.ops.sparse_attention.definitions import masked_dense

BATCH, HEADS, WIDTH = 2, 3, 8
PATTERNS = {
    "fixed": (FixedSparsityConfig(HEADS, 4), 64),
    "fixed per head": (
        FixedSparsityConfig(HEADS, 4, True, num_different_global_patterns=4, attention="unidirectional"),
        52,
    ),
    "bigbird": (BigBirdSparsityConfig(HEADS, 5, True, 2), 60),
    "variable": (VariableSparsityConfig(HEADS, 3, num_random_blocks=1, local_window_blocks=[1, 2, 3]), 45),
    "longformer": (BSLongformerSparsityConfig(HEADS, 16), 128),
    "window of tokens": (LocalSlidingWindowSparsityConfig(HEADS, 1), 9),
    "rows that see nothing": (
        VariableSparsityConfig(HEADS, 4, local_window_blocks=[], global_block_indices=[2], attention="unidirectional"),
        32,
    ),
}


def _random(length, dtype=torch.float32):
    return [torch.randn(BATCH, HEADS, length, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]


def _key_bias(length, dtype):
    bias = torch.zeros(BATCH, length, dtype=dtype)
    bias[0, length // 2 :] = float("-inf")
    bias[1, :5] = float("-inf")
    return bias


def _compare(length, layout, block, dtype, tolerance, *, inputs=None, **added):
    query, key, value = _random(length, dtype)
    sparse = attend(query, key, value, compile_layout(layout, block), **added)
    dense = masked_dense(query, key, value, layout, block, **added)
    assert (sparse - dense).abs().max() <= tolerance
    gradient = torch.randn_like(sparse)
    leaves = [query, key, value, *(tensor for tensor in (inputs or []))]
    for mine, theirs in zip(
        torch.autograd.grad(sparse, leaves, gradient), torch.autograd.grad(dense, leaves, gradient), strict=True
    ):
        assert (mine - theirs).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_and_gradients_are_those_of_masked_dense_attention(pattern, is_causal):
    config, length = PATTERNS[pattern]
    torch.manual_seed(0)
    random.seed(0)
    layout = config.make_layout(length)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):  # torch's kernel; autograd
        _compare(length, layout, config.block, dtype, tolerance, is_causal=is_causal)
        added = {"key_bias": _key_bias(length, dtype), "bias": torch.randn(1, 1, length, length, dtype=dtype)}
        _compare(length, layout, config.block, dtype, tolerance, is_causal=is_causal, **added)
        position = torch.randn(BATCH, HEADS, length, length, dtype=dtype, requires_grad=True)
        _compare(
            length,
            layout,
            config.block,
            dtype,
            tolerance,
            inputs=[position],
            is_causal=is_causal,
            bias=position,
            scale=0.3,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    layout = FixedSparsityConfig(HEADS, 16).make_layout(256)
    query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in _random(256))
    sparse = attend(query, key, value, compile_layout(layout, 16))
    exact = masked_dense(query.float(), key.float(), value.float(), layout, 16)
    assert sparse.dtype == dtype
    assert (sparse - exact).abs().max() < 0.02
    sparse.sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()


def test_dropped_probabilities_keep_the_mean():
    torch.manual_seed(0)
    layout = FixedSparsityConfig(HEADS, 4).make_layout(32)
    query, key, value = (tensor.detach() for tensor in _random(32))
    plan = compile_layout(layout, 4)
    whole = attend(query, key, value, plan)
    mean = sum(attend(query, key, value, plan, dropout=0.3) for _ in range(2000)) / 2000
    assert (mean - whole).abs().max() < 0.1
    assert not torch.equal(attend(query, key, value, plan, dropout=0.3), whole)


def test_no_entry_that_is_hidden_is_read():
    """NaN in keys that no row sees stays where it is."""
    layout = LocalSlidingWindowSparsityConfig(HEADS, 8, attention="unidirectional").make_layout(64)
    layout[:, :, 5] = 0
    query, key, value = (tensor.detach() for tensor in _random(64))
    key[:, :, 40:48] = float("nan")
    value[:, :, 40:48] = float("nan")
    assert attend(query, key, value, compile_layout(layout, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("shape", "words"), [((BATCH, HEADS, 48, WIDTH), "64 tokens"), ((BATCH, 2, 64, WIDTH), "2 heads")]
)
def test_shapes_that_do_not_fit_are_named(shape, words):
    plan = compile_layout(FixedSparsityConfig(HEADS, 4).make_layout(64), 4)
    with pytest.raises(ValueError, match=words):
        attend(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), plan)


# --- the module


def test_two_patterns_of_one_length_do_not_share_a_layout():
    query, key, value = (tensor.detach() for tensor in _random(64))
    results = [
        SparseSelfAttention(config, max_seq_length=64)(query, key, value)
        for config in (FixedSparsityConfig(HEADS, 4), DenseSparsityConfig(HEADS, 4), FixedSparsityConfig(HEADS, 8))
    ]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


class EveryThird(SparsityConfig):
    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        layout[:, :, ::3] = 1
        return layout


def test_masks_of_both_modes_positions_and_a_pattern_of_ones_own():
    torch.manual_seed(0)
    length, config = 48, EveryThird(HEADS, 4)
    query, key, value = (tensor.detach() for tensor in _random(length))
    layout = config.make_layout(length)
    position = torch.randn(HEADS, length, length, requires_grad=True)
    kept = torch.ones(BATCH, length)
    kept[1, 20:] = 0
    seen = torch.ones(length, length).tril()
    hide = {1.0: 0.0, 0.0: float("-inf")}
    added = torch.tensor([[hide[v] for v in row] for row in kept.tolist()])
    masked = torch.tensor([[hide[v] for v in row] for row in seen.tolist()])
    wanted = masked_dense(query, key, value, layout, 4, key_bias=added, bias=position[None] + masked)
    for modes, masks in (
        (("mul", "mul"), (kept, seen)),
        (("add", "add"), (added[:, None, None], masked[None, None])),
        (("add", "mul"), (added, seen.bool())),
    ):
        attention = SparseSelfAttention(config, *modes, max_seq_length=64)
        found = attention(query, key, value, rpe=position, key_padding_mask=masks[0], attn_mask=masks[1])
        assert (found - wanted).abs().max() < 1e-6
        turned = attention(
            query, key.transpose(2, 3), value, rpe=position, key_padding_mask=masks[0], attn_mask=masks[1]
        )
        assert torch.equal(turned, found)
    (gradient,) = torch.autograd.grad(found.sum(), position)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), position)
    assert (gradient - wanted_gradient).abs().max() < 1e-5


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize(
    "shape", [(), (1,), (HEADS,), (1, 1), (1, HEADS), (BATCH, 1), (BATCH, HEADS)], ids=lambda shape: f"before{shape}"
)
def test_positions_broadcast_over_samples_and_heads(shape, wants_grad):
    length, config = 64, FixedSparsityConfig(HEADS, 4)
    assert BATCH > 1
    query, key, value = _random(length)
    position = torch.randn(*shape, length, length, requires_grad=wants_grad)
    found = SparseSelfAttention(config, max_seq_length=length)(query, key, value, rpe=position)
    wanted = masked_dense(query, key, value, config.make_layout(length), 4, bias=position)
    assert (found - wanted).abs().max() < 1e-5
    inputs = (query, key, value, position) if wants_grad else (query, key, value)
    gradients = torch.autograd.grad(found.square().sum(), inputs)
    for one, other in zip(gradients, torch.autograd.grad(wanted.square().sum(), inputs), strict=True):
        assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(64,), (48, 48), (HEADS + 1, 64, 64), (BATCH + 1, HEADS, 64, 64)])
def test_positions_that_do_not_fit_are_named(shape):
    query, key, value = (tensor.detach() for tensor in _random(64))
    with pytest.raises(ValueError, match=r"rpe: expected .* found \["):
        SparseSelfAttention(FixedSparsityConfig(HEADS, 4))(query, key, value, rpe=torch.zeros(shape))


def test_shorter_sequences_use_the_corner_and_longer_ones_a_layout_of_their_own():
    config = FixedSparsityConfig(HEADS, 4)
    attention = SparseSelfAttention(config, max_seq_length=36)
    assert torch.equal(attention.get_layout(20), config.make_layout(36)[:, :5, :5])
    assert torch.equal(attention.get_layout(64), config.make_layout(64))
    query, key, value = (tensor.detach() for tensor in _random(64))
    wanted = masked_dense(query, key, value, config.make_layout(64), 4)
    assert (attention(query, key, value) - wanted).abs().max() < 1e-6
    with pytest.raises(ValueError, match="multiple of the block size 4"):
        attention.get_layout(21)


def test_a_loaded_layout_counts():
    random.seed(1)
    attention = SparseSelfAttention(BigBirdSparsityConfig(HEADS, 4), max_seq_length=64)
    other = SparseSelfAttention(BigBirdSparsityConfig(HEADS, 4), max_seq_length=64)
    query, key, value = (tensor.detach() for tensor in _random(64))
    before = other(query, key, value)
    assert not torch.equal(before, attention(query, key, value))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(query, key, value), attention(query, key, value))


# --- the two halves


def test_products_and_softmax_make_up_attention():
    torch.manual_seed(0)
    random.seed(0)
    config = BigBirdSparsityConfig(HEADS, 4, True)
    layout = config.make_layout(32)
    query, key, value = _random(32)
    kept = torch.ones(BATCH, 32)
    kept[0, 10:] = 0
    scores = MatMul(layout, 4, "sdd", trans_b=True)(query, key)
    assert scores.shape == (BATCH, int(layout.sum()), 4, 4)
    probabilities = Softmax(layout, 4)(scores, scale=0.5, key_padding_mask=kept, key_padding_mask_mode="mul")
    found = MatMul(layout, 4, "dsd")(probabilities, value)
    bias = torch.zeros(BATCH, 32).masked_fill(kept == 0, float("-inf"))
    wanted = masked_dense(query, key, value, layout, 4, scale=0.5, key_bias=bias)
    assert (found - wanted).abs().max() < 1e-6
    leaves = [query, key, value]
    gradient = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient), strict=True
    ):
        assert (mine - theirs).abs().max() < 1e-5


def _whole(sparse, layout, block):
    heads, rows, columns = layout.nonzero().T
    whole = torch.zeros(sparse.size(0), *layout.shape, block, block)
    whole[:, heads, rows, columns] = sparse
    return whole.transpose(3, 4).reshape(sparse.size(0), layout.size(0), layout.size(1) * block, -1)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_with_a_sparse_factor(is_transposed):
    torch.manual_seed(0)
    layout = (torch.rand(HEADS, 3, 5) < 0.5).long()
    sparse = torch.randn(BATCH, int(layout.sum()), 4, 4)
    whole = _whole(sparse, layout, 4)
    whole = whole.transpose(2, 3) if is_transposed else whole
    right, left = torch.randn(BATCH, HEADS, whole.size(3), 7), torch.randn(BATCH, HEADS, 7, whole.size(2))
    found = MatMul(layout, 4, "dsd", trans_a=is_transposed)(sparse, right)
    assert (found - whole @ right).abs().max() < 1e-5
    found = MatMul(layout, 4, "dds", trans_b=is_transposed)(left, sparse)
    assert (found - left @ whole).abs().max() < 1e-5
    one = MatMul(layout[:1], 4, "dsd", trans_a=is_transposed)
    few = sparse[:1, : int(layout[0].sum())]
    assert one(few, right[0, 0]).shape == (whole.size(2), 7)
    with pytest.raises(ValueError, match="expected one"):
        one(few, right[0, 0].double())
