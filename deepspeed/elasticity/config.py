"""Upstream's import path for names of ``elasticity.elasticity`` and ``errors``."""

from deepspeed.elasticity.elasticity import ElasticityConfig as ElasticityConfig
from deepspeed.errors import ElasticityConfigError as ElasticityConfigError
from deepspeed.errors import ElasticityError as ElasticityError
from deepspeed.errors import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize
