"""``sparse_attention``: block-sparse attention, for Transformers models and for model code that requests it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Int, IntList

_COMMON = ("block", "attention", "different_layout_per_head")

#: The keys that each mode reads.
KEYS_OF_MODE: dict[str, tuple[str, ...]] = {
    "dense": ("block",),
    "fixed": (
        *_COMMON,
        *("num_local_blocks", "num_global_blocks", "horizontal_global_attention", "num_different_global_patterns"),
    ),
    "variable": (
        *_COMMON,
        *("num_random_blocks", "local_window_blocks", "global_block_indices", "global_block_end_indices"),
        "horizontal_global_attention",
    ),
    "bigbird": (*_COMMON, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    "bslongformer": (
        *_COMMON,
        *("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"),
    ),
}


class SparseAttention(Section):
    """Block-sparse attention (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.ops.sparse_attention.feature"

    apply_to: Annotated[Literal["program", "model"], AnyCase] = key(
        "program",
        '"model": initialize makes every attention layer of a Transformers model sparse. "program": the model\'s '
        "own code does, and reads this section.",
    )
    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], AnyCase] = key(
        "fixed", "Pattern.", removed="0.19.8"
    )
    block: Int = key(16, "Block size.", unit="elements", above=0)
    different_layout_per_head: Bool = key(False, "Use a pattern per head; not for dense.")
    num_local_blocks: Int = key(4, "Local blocks (fixed).", unit="blocks", above=0)
    num_global_blocks: Int = key(1, "Global blocks (fixed, bigbird).", unit="blocks", minimum=0)
    attention: Annotated[Literal["bidirectional", "unidirectional"], AnyCase] = key(
        "bidirectional", "bidirectional, or unidirectional (causal by blocks); not for dense."
    )
    horizontal_global_attention: Bool = key(False, "Let global blocks attend to all blocks too (fixed, variable).")
    num_different_global_patterns: Int = key(1, "Number of global patterns (fixed).", above=0)
    num_random_blocks: Int = key(0, "Random blocks (variable, bigbird).", unit="blocks", minimum=0)
    local_window_blocks: IntList = key(
        None, "Sizes of the local windows (variable).", factory=lambda: [4], unit="blocks", above=0
    )
    global_block_indices: IntList = key(
        None, "Global blocks, or starts of their ranges (variable, bslongformer).", factory=lambda: [0], minimum=0
    )
    global_block_end_indices: IntList | None = key(
        None, "Ends of the ranges of global blocks (variable, bslongformer).", minimum=0
    )
    num_sliding_window_blocks: Int = key(
        3, "Size of the sliding window (bigbird, bslongformer).", unit="blocks", above=0
    )
