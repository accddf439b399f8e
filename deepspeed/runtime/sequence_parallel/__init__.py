"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as parallel_state_sp
    from deepspeed.runtime.sequence_parallel import ulysses_sp as ulysses_sp
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
