"""Access to fragments of parameters; re-exports from :mod:`deepspeed.utils`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_NAMES = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
).split()

__getattr__, __dir__, __all__ = lazy_names(__name__, dict.fromkeys(_NAMES, "deepspeed.zero.access.states"))
