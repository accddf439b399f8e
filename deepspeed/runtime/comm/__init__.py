"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.comm import coalesced_collectives as coalesced_collectives
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
