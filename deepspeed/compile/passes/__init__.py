"""Upstream's import path for names of missing features."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.compile.passes import sp_compile as sp_compile
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
