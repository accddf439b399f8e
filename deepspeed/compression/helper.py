"""Upstream's import path for names of ``compression.installing``."""

from deepspeed.compression.installing import convert_conv1d_to_linear as convert_conv1d_to_linear
from deepspeed.compression.installing import recursive_getattr as recursive_getattr
from deepspeed.compression.installing import recursive_setattr as recursive_setattr
