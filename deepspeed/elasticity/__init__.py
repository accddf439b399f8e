"""Batch sizes that suit many numbers of ranks, runs that continue when ranks are lost, and the elastic agent."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.elasticity import config as config
    from deepspeed.elasticity import constants as constants
    from deepspeed.elasticity import elastic_agent as elastic_agent
    from deepspeed.elasticity import elasticity as elasticity
    from deepspeed.elasticity import utils as utils
    from deepspeed.elasticity.elastic_agent import DSElasticAgent as DSElasticAgent
    from deepspeed.elasticity.elastic_run import CopyCost as CopyCost
    from deepspeed.elasticity.elastic_run import Recovery as Recovery
    from deepspeed.elasticity.elasticity import ELASTICITY as ELASTICITY
    from deepspeed.elasticity.elasticity import ENABLED as ENABLED
    from deepspeed.elasticity.elasticity import ENABLED_DEFAULT as ENABLED_DEFAULT
    from deepspeed.elasticity.elasticity import ElasticityConfig as ElasticityConfig
    from deepspeed.elasticity.elasticity import compute_elastic_config as compute_elastic_config
    from deepspeed.elasticity.elasticity import elasticity_enabled as elasticity_enabled
    from deepspeed.elasticity.elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config
    from deepspeed.elasticity.elasticity import is_torch_elastic_compatible as is_torch_elastic_compatible
    from deepspeed.elasticity.steps import ElasticStep as ElasticStep
    from deepspeed.elasticity.steps import ElasticSteps as ElasticSteps
    from deepspeed.errors import ElasticityConfigError as ElasticityConfigError
    from deepspeed.errors import ElasticityError as ElasticityError
    from deepspeed.errors import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize

lazy_names(__name__)
