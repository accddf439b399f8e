"""Upstream's import path for names of missing features."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.transformer import inference as inference
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
