"""Detects and wraps what the Transformers library does while it builds a model for ZeRO stage 3; does not import it.

After ``from_config`` and ``from_pretrained`` have built a model, the library initializes and ties all of its weights.
:func:`wrap_passes` wraps these passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_INITIALIZERS = "transformers.initialization"
_MODELS = "transformers.modeling_utils"
_ZERO = "transformers.integrations.deepspeed"
_WRAPPED = "_ds_served"
_STAGE_3 = "_hf_deepspeed_config_weak_ref"


def is_building() -> bool:
    """Returns whether the library itself builds a model under ``zero.Init`` at the moment.

    Tables of positions must then keep the precision that they are computed in. Newer versions of the library ensure
    that by replacing the wrapper of ``torch.arange``; older ones do not.
    """
    return bool(getattr(sys.modules.get(_MODELS), "_is_ds_init_called", False))


def is_building_from_config() -> bool:
    """Returns whether it builds a model without loading values; while it loads, it replaces ``tie_weights``."""
    if not is_building():
        return False
    return bool(sys.modules[_MODELS].PreTrainedModel.tie_weights.__module__ != _INITIALIZERS)


def recorded_initializer(name: str) -> Callable[..., Any] | None:
    """Returns the function of ``torch.nn.init`` as it was before the library replaced it; None if it did not."""
    recorded: dict[str, Callable[..., Any]] = getattr(sys.modules.get(_INITIALIZERS), "TORCH_INIT_FUNCTIONS", {})
    return recorded.get(name)


def wrap_passes(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the library's initialization of weights by ``wrap(pass)``, if it has been imported; once only.

    Its variant for ZeRO stage 3, in which only rank 0 runs the model's code, is replaced by the ordinary one.
    """
    kind: Any = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    integration: Any = sys.modules.get(_ZERO)
    if not hasattr(kind, "initialize_weights") or hasattr(kind, _WRAPPED):
        return
    for name in ("initialize_weights", "_adjust_bias"):
        if hasattr(kind, name):
            setattr(kind, name, wrap(getattr(kind, name)))
    setattr(kind, _WRAPPED, True)
    if hasattr(integration, "initialize_weights_zero3"):
        integration.initialize_weights_zero3 = _initialize_weights


def _initialize_weights(model: Any) -> None:
    """Runs in place of the variant for ZeRO stage 3."""
    model.initialize_weights()


@contextmanager
def hide_stage_3() -> Iterator[None]:
    """Hides from models that stage 3 is on, inside the context: otherwise some compute a table on rank 0 only."""
    integration: Any = sys.modules[_ZERO]
    before = getattr(integration, _STAGE_3, None)
    setattr(integration, _STAGE_3, None)
    try:
        yield
    finally:
        if getattr(integration, _STAGE_3) is None:  # otherwise the program has set it in the meantime
            setattr(integration, _STAGE_3, before)
