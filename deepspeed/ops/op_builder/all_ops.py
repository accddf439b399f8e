"""All operators by name."""

from __future__ import annotations

from deepspeed.ops.op_builder import builder

ALL_OPS: dict[str, builder.OpBuilder] = {kind.NAME: kind() for kind in builder.builders()}
"""Name of an operator -> its builder."""

COMPATIBLE: dict[str, bool] = {kind.NAME: kind().is_compatible() for kind in builder.builders()}
"""Name of an operator -> whether a module implements it."""
