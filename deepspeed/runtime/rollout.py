"""Where programs import the classes of rollouts from."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_HOME = "deepspeed.engine.rollout"
__getattr__, __dir__, __all__ = lazy_names(
    __name__, dict.fromkeys(("HybridEngineRollout", "RolloutBatch", "RolloutRequest", "SamplingConfig"), _HOME)
)
