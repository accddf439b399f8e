"""This name stands for the module :mod:`deepspeed.activation_checkpointing.checkpointing` itself."""

from __future__ import annotations

import sys

from deepspeed.activation_checkpointing import checkpointing

sys.modules[__name__] = checkpointing
