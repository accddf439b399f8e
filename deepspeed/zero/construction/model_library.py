"""What transformers does with models that are built for ZeRO stage 3, as far as it needs help.

After ``from_config`` and ``from_pretrained`` have built a model under ``zero.Init``, transformers passes over all of it
to give weights their first values. The pass of a model that is not sharded is right as it is, if every rank runs it and
a weight is full when it is its turn: no more than that is done here. The variant that transformers has for ZeRO stage 3
gathers a module's own weights (in newer versions its children's too) and lets only rank 0 run the model's code. It
cannot serve code that writes to weights further down, and buffers that the code fills stay empty on the other ranks.
Tying weights is such a pass too: it makes the bias of a head as long as the weight that the head gets.

The passes leave some weights to the constructors, such as the two of a convolution under ``weight_norm``. All the same
``from_config`` switches torch's initialisers off when ZeRO stage 3 is on, and these weights would be uninitialised
memory; so the initialisers are switched on again. ``from_pretrained`` has the values in its files.

Only these passes are served. Other code that touches a sharded weight is refused as everywhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.zero.construction.modules import serving_all_ranks
from deepspeed.zero.construction.patches import Patch

_INITIALISERS = "transformers.initialization"
_MODELS = "transformers.modeling_utils"
_ZERO = "transformers.integrations.deepspeed"


def is_building() -> bool:
    """Whether transformers itself builds a model under ``zero.Init`` at the moment.

    Tables of positions are meant to keep the precision that they are computed in then. Newer versions of transformers
    see to it by replacing the wrapper of ``torch.arange``; with the others, this is how to know.
    """
    return bool(getattr(sys.modules.get(_MODELS), "_is_ds_init_called", False))


def is_building_from_config() -> bool:
    """Whether it builds one that no values are loaded into; otherwise it switches the tying of weights off."""
    if not is_building():
        return False
    return bool(sys.modules[_MODELS].PreTrainedModel.tie_weights.__module__ != _INITIALISERS)


def recorded_initialiser(name: str) -> Callable[..., Any] | None:
    """The function of ``torch.nn.init`` that transformers recorded before it ever replaced it; None without it."""
    recorded: dict[str, Callable[..., Any]] = getattr(sys.modules.get(_INITIALISERS), "TORCH_INIT_FUNCTIONS", {})
    return recorded.get(name)


def serve_passes() -> None:
    """Makes the passes find full weights from now on, if transformers has been imported; may be called again."""
    kind: Any = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    integration: Any = sys.modules.get(_ZERO)
    if not hasattr(kind, "initialize_weights") or hasattr(kind, _SERVED):
        return
    for name in ("initialize_weights", "_adjust_bias"):
        if hasattr(kind, name):
            setattr(kind, name, _served(getattr(kind, name)))
    setattr(kind, _SERVED, True)
    if hasattr(integration, "initialize_weights_zero3"):
        integration.initialize_weights_zero3 = _initialize_weights


_SERVED = "_ds_served"


def _served(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def serve(*args: Any, **kwargs: Any) -> Any:
        with serving_all_ranks(), _stage_3_unmentioned():
            return original(*args, **kwargs)

    return serve


@contextmanager
def _stage_3_unmentioned() -> Iterator[None]:
    """Inside, models find stage 3 off: where it is on, some let rank 0 alone compute a table."""
    patch = Patch(sys.modules[_ZERO], "_hf_deepspeed_config_weak_ref", None)
    patch.apply()
    try:
        yield
    finally:
        patch.revert()


def _initialize_weights(model: Any) -> None:
    """In the place of the variant for ZeRO stage 3."""
    model.initialize_weights()
