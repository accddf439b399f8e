"""Upstream's import path for names of ``ops.op_builder``."""

from deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
from deepspeed.ops.op_builder import GDSBuilder as GDSBuilder
