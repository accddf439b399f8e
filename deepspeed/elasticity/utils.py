"""Upstream's import path for names of ``elasticity.elasticity``."""

from deepspeed.elasticity.elasticity import is_torch_elastic_compatible as is_torch_elastic_compatible
