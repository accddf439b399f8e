"""The module :mod:`deepspeed.activation_checkpointing.checkpointing` under upstream's import path."""

import sys

from deepspeed.activation_checkpointing.checkpointing import *  # noqa: F403  # for type checkers
from deepspeed.activation_checkpointing.checkpointing import _CUDA_RNG_STATE_TRACKER as _CUDA_RNG_STATE_TRACKER
from deepspeed.activation_checkpointing.checkpointing import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME as _MODEL_PARALLEL_RNG_TRACKER_NAME,
)
from deepspeed.activation_checkpointing.checkpointing import _set_cuda_rng_state as _set_cuda_rng_state

sys.modules[__name__] = sys.modules["deepspeed.activation_checkpointing.checkpointing"]
