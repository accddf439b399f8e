"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing
    from deepspeed.runtime.activation_checkpointing import config as config

lazy_names(__name__)
