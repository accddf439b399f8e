"""Upstream's import path for names of ``checkpoint.upstream.files``."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint.upstream.files import SubparamShape as SubparamShape
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
