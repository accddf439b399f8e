"""Upstream's import path for names of ``comm.torch_backend``."""

from deepspeed.comm.torch_backend import TorchBackend as TorchBackend
