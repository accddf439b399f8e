"""Parallel groups. This name stands for the module :mod:`deepspeed.comm.job.groups`, registered ``mpu`` included."""

from __future__ import annotations

import sys

from deepspeed.comm.job import groups

sys.modules[__name__] = groups
