"""Upstream's import path for names of ``comm.base.recorder``."""

from deepspeed.comm.base.recorder import CommsLog as CommsLogger

__all__ = ["CommsLogger"]
