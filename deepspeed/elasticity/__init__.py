"""Batch sizes that suit many numbers of ranks, runs that continue when ranks are lost, and the elastic agent."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "CopyCost": "deepspeed.elasticity.elastic_run",
        "DSElasticAgent": "deepspeed.elasticity.elastic_agent",
        "ELASTICITY": "deepspeed.elasticity.elasticity",
        "ENABLED": "deepspeed.elasticity.elasticity",
        "ENABLED_DEFAULT": "deepspeed.elasticity.elasticity",
        "ElasticStep": "deepspeed.elasticity.steps",
        "ElasticSteps": "deepspeed.elasticity.steps",
        "ElasticityConfig": "deepspeed.elasticity.elasticity",
        "ElasticityConfigError": "deepspeed.errors",
        "ElasticityError": "deepspeed.errors",
        "ElasticityIncompatibleWorldSize": "deepspeed.errors",
        "Recovery": "deepspeed.elasticity.elastic_run",
        "compute_elastic_config": "deepspeed.elasticity.elasticity",
        "elasticity_enabled": "deepspeed.elasticity.elasticity",
        "ensure_immutable_elastic_config": "deepspeed.elasticity.elasticity",
        "is_torch_elastic_compatible": "deepspeed.elasticity.elasticity",
    },
    submodules=["config", "constants", "elastic_agent", "elasticity", "utils"],
)
