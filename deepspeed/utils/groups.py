"""Parallel groups. This name stands for the module :mod:`deepspeed.comm.groups` itself, registered ``mpu`` included."""

from __future__ import annotations

import sys

from deepspeed.comm import groups

sys.modules[__name__] = groups
