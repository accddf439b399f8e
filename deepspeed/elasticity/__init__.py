"""Batch sizes that suit many numbers of ranks, runs that continue when ranks are lost, and the elastic agent."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.elasticity.elastic_run": "CopyCost Recovery",
        "deepspeed.elasticity.elastic_agent": "DSElasticAgent",
        "deepspeed.elasticity.elasticity": (
            "ELASTICITY ENABLED ENABLED_DEFAULT ElasticityConfig compute_elastic_config elasticity_enabled "
            "ensure_immutable_elastic_config is_torch_elastic_compatible"
        ),
        "deepspeed.elasticity.steps": "ElasticStep ElasticSteps",
        "deepspeed.errors": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    },
    submodules="config constants elastic_agent elasticity utils",
)
