"""What the Transformers library does while it builds a model for ZeRO stage 3; nothing here imports it.

After ``from_config`` and ``from_pretrained`` have built a model, the library passes over all of it to give weights
their first values, and to tie them. These passes can be wrapped here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_INITIALISERS = "transformers.initialization"
_MODELS = "transformers.modeling_utils"
_ZERO = "transformers.integrations.deepspeed"
_SERVED = "_ds_served"
_STAGE_3 = "_hf_deepspeed_config_weak_ref"


def is_building() -> bool:
    """Returns whether the library itself builds a model under ``zero.Init`` at the moment.

    Tables of positions are meant to keep the precision that they are computed in then. Newer versions of the library
    see to it by replacing the wrapper of ``torch.arange``; with the others, this detects it.
    """
    return bool(getattr(sys.modules.get(_MODELS), "_is_ds_init_called", False))


def is_building_from_config() -> bool:
    """Returns whether it builds one that no values are loaded into; otherwise it switches the tying of weights off."""
    if not is_building():
        return False
    return bool(sys.modules[_MODELS].PreTrainedModel.tie_weights.__module__ != _INITIALISERS)


def recorded_initialiser(name: str) -> Callable[..., Any] | None:
    """Returns the function of ``torch.nn.init`` that the library recorded before it replaced it; None without it."""
    recorded: dict[str, Callable[..., Any]] = getattr(sys.modules.get(_INITIALISERS), "TORCH_INIT_FUNCTIONS", {})
    return recorded.get(name)


def wrap_passes(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the passes that give weights their first values, if the library has been imported; once only.

    The variant for ZeRO stage 3, in which rank 0 alone runs the model's code, becomes the ordinary one.

    Args:
        wrap: From a pass to what is called in its place.
    """
    kind: Any = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    integration: Any = sys.modules.get(_ZERO)
    if not hasattr(kind, "initialize_weights") or hasattr(kind, _SERVED):
        return
    for name in ("initialize_weights", "_adjust_bias"):
        if hasattr(kind, name):
            setattr(kind, name, wrap(getattr(kind, name)))
    setattr(kind, _SERVED, True)
    if hasattr(integration, "initialize_weights_zero3"):
        integration.initialize_weights_zero3 = _initialize_weights


def _initialize_weights(model: Any) -> None:
    """Runs in place of the variant for ZeRO stage 3."""
    model.initialize_weights()


@contextmanager
def stage_3_unmentioned() -> Iterator[None]:
    """Shows models that stage 3 is off inside the context: with it on, some let rank 0 alone compute a table."""
    integration: Any = sys.modules[_ZERO]
    before = getattr(integration, _STAGE_3, None)
    setattr(integration, _STAGE_3, None)
    try:
        yield
    finally:
        if getattr(integration, _STAGE_3) is None:  # what was set by others since then stays
            setattr(integration, _STAGE_3, before)
