"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as parallel_state_sp
    from deepspeed.runtime.sequence_parallel import ulysses_sp as ulysses_sp

lazy_names(__name__)
