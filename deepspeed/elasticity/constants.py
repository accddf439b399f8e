"""Upstream's import path for names of ``elasticity.elasticity``."""

from deepspeed.elasticity.elasticity import DEEPSPEED_ELASTICITY_CONFIG as DEEPSPEED_ELASTICITY_CONFIG
from deepspeed.elasticity.elasticity import ELASTICITY as ELASTICITY
from deepspeed.elasticity.elasticity import ENABLED as ENABLED
from deepspeed.elasticity.elasticity import ENABLED_DEFAULT as ENABLED_DEFAULT
from deepspeed.elasticity.elasticity import LATEST_ELASTICITY_VERSION as LATEST_ELASTICITY_VERSION
from deepspeed.elasticity.elasticity import MINIMUM_DEEPSPEED_VERSION as MINIMUM_DEEPSPEED_VERSION
