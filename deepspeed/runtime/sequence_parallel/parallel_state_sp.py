"""Groups of ranks that share sequences, as an mpu; see :mod:`deepspeed.parallel.sequence.state`."""

from __future__ import annotations

import sys

from deepspeed.parallel.sequence import state

sys.modules[__name__] = state
