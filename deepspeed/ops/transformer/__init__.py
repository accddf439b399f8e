"""Upstream's import path for names of missing features."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.transformer import inference as inference

lazy_names(__name__)
