"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.compile import passes as passes
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
