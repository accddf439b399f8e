"""Questions about experts; re-exports; the code is in :mod:`deepspeed.parallel.expert.param_groups`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_HOME = "deepspeed.parallel.expert.param_groups"
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    dict.fromkeys(
        (
            "configure_moe_param_groups",
            "has_moe_layers",
            "is_moe_param",
            "is_moe_param_group",
            "split_params_grads_into_shared_and_expert_params",
            "split_params_into_different_moe_groups_for_optimizer",
            "split_params_into_shared_and_expert_params",
        ),
        _HOME,
    ),
)
