"""Half precision; re-exports only."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, submodules=["fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"]
)
