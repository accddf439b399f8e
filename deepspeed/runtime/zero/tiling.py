"""Upstream's import path for names of ``zero.tiled_linear``."""

from deepspeed.zero.tiled_linear import TiledLinear as TiledLinear
from deepspeed.zero.tiled_linear import TiledLinearReturnBias as TiledLinearReturnBias
