import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)
from tests.ops.sparse_attention.definitions import layout_of

WORDS = st.sampled_from(["bidirectional", "unidirectional"])
COMMON = {"num_heads": st.integers(1, 3), "block": st.integers(1, 20), "different_layout_per_head": st.booleans()}


@st.composite
def fixed(draw):
    width = draw(st.integers(1, 3))
    most = draw(st.integers(1, 3))
    common = {name: draw(values) for name, values in COMMON.items()}
    word = draw(WORDS)
    return FixedSparsityConfig(
        **common,
        num_local_blocks=width * most,
        num_global_blocks=width,
        attention=word,
        horizontal_global_attention=word == "bidirectional" and draw(st.booleans()),
        num_different_global_patterns=draw(st.integers(1, most)) if common["different_layout_per_head"] else 1,
    )


@st.composite
def ranges(draw):
    starts = draw(st.lists(st.integers(0, 14), max_size=3))
    if draw(st.booleans()):
        return {"global_block_indices": starts}
    return {"global_block_indices": starts, "global_block_end_indices": [s + draw(st.integers(1, 4)) for s in starts]}


@st.composite
def variable(draw):
    word = draw(WORDS)
    return VariableSparsityConfig(
        **{name: draw(values) for name, values in COMMON.items()},
        num_random_blocks=draw(st.integers(0, 3)),
        local_window_blocks=draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        **draw(ranges()),
        attention=word,
        horizontal_global_attention=word == "bidirectional" and draw(st.booleans()),
    )


@st.composite
def big_bird(draw):
    word = draw(WORDS)
    return BigBirdSparsityConfig(
        **{name: draw(values) for name, values in COMMON.items()},
        num_random_blocks=draw(st.integers(0, 1 if word == "unidirectional" else 3)),
        num_sliding_window_blocks=draw(st.integers(1, 4)),
        num_global_blocks=draw(st.integers(0, 3)),
        attention=word,
    )


@st.composite
def longformer(draw):
    return BSLongformerSparsityConfig(
        **{name: draw(values) for name, values in COMMON.items()},
        num_sliding_window_blocks=draw(st.integers(1, 4)),
        **draw(ranges()),
        attention=draw(WORDS),
    )


@st.composite
def sliding(draw):
    return LocalSlidingWindowSparsityConfig(2, draw(st.integers(1, 20)), draw(st.integers(1, 4)), draw(WORDS))


ANY = st.one_of(fixed(), variable(), big_bird(), longformer(), sliding(), st.just(DenseSparsityConfig(2, 4)))


@settings(max_examples=150, deadline=None)
@given(config=ANY, blocks=st.integers(4, 13), seed=st.integers(0, 99))
def test_layouts_are_those_of_the_definitions_with_the_same_random_draws(config, blocks, seed):
    random.seed(seed)
    made = config.make_layout(blocks * config.block)
    random.seed(seed)
    assert made.dtype == torch.int64
    assert torch.equal(made, layout_of(config, blocks * config.block))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: FixedSparsityConfig(2, num_local_blocks=4, num_global_blocks=3), ValueError, "multiple"),
        (lambda: FixedSparsityConfig(2, attention="sideways"), NotImplementedError, "sideways"),
        (
            lambda: FixedSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
            ValueError,
            "horizontal",
        ),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), ValueError, "different_layout_per_head"),
        (
            lambda: FixedSparsityConfig(2, different_layout_per_head=True, num_different_global_patterns=5),
            ValueError,
            "at most 4",
        ),
        (
            lambda: VariableSparsityConfig(2, global_block_indices=[1, 2], global_block_end_indices=[2]),
            ValueError,
            "as many",
        ),
        (
            lambda: BSLongformerSparsityConfig(2, global_block_indices=[3], global_block_end_indices=[3]),
            ValueError,
            "end after the start",
        ),
        (lambda: FixedSparsityConfig(2, 16).make_layout(40), ValueError, "pad the sequences to 48"),
        (lambda: BigBirdSparsityConfig(2, 16, num_random_blocks=9).make_layout(64), ValueError, "num_random_blocks=9"),
        (
            lambda: BigBirdSparsityConfig(2, num_random_blocks=2, attention="unidirectional").make_layout(64),
            ValueError,
            "at most 1",
        ),
        (lambda: LocalSlidingWindowSparsityConfig(2).make_layout(16), ValueError, "num_sliding_window_blocks=3"),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[4, 0]), ValueError, "expected positive sizes"),
        (lambda: SparsityConfig(2).make_layout(16), NotImplementedError, "make_layout"),
        (lambda: SparseSelfAttention("fixed"), TypeError, "SparsityConfig"),
        (lambda: SparseSelfAttention(DenseSparsityConfig(2), attn_mask_mode="or"), ValueError, "attn_mask_mode='or'"),
    ],
)
def test_wrong_numbers_are_named(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize("word", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("kind", [BSLongformerSparsityConfig, VariableSparsityConfig])
def test_global_blocks_count_from_the_end_too(kind, word):
    def layout(start, *end):
        ends = list(end) or None
        return kind(1, 4, global_block_indices=[start], global_block_end_indices=ends, attention=word)

    for negative, meant in (((-1,), (7,)), ((-8,), (0,)), ((-3, -1), (5, 7)), ((-2, 0), (6, 8)), ((-9,), (8,))):
        assert torch.equal(layout(*negative).make_layout(32), layout(*meant).make_layout(32))


def test_layouts_of_many_lengths_keep_their_random_blocks():
    attention = SparseSelfAttention(BigBirdSparsityConfig(1, 1), max_seq_length=4)
    first = attention.get_layout(30).clone()
    for length in range(31, 50):
        attention.get_layout(length)
    assert torch.equal(attention.get_layout(30), first)
