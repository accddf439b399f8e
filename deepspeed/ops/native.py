"""Which of upstream's native operators a program may count on: those whose work is done here, uncompiled."""

from __future__ import annotations

from deepspeed.ops.op_builder.builder import builders

COMPATIBLE: dict[str, bool] = {kind.NAME: kind().is_compatible() for kind in builders()}
