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

Files are loaded by :mod:`deepspeed.zero.construction.model_files`.

Only these passes are served. Other code that touches a sharded weight is refused as everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.models.construction import stage_3_unmentioned, wrap_passes
from deepspeed.models.loading import wrap_loading
from deepspeed.zero.construction.model_files import load_files
from deepspeed.zero.construction.modules import serving_all_ranks


def serve_passes() -> None:
    """Makes the passes find full weights from now on, if transformers has been imported; may be called again."""
    wrap_passes(_served)
    wrap_loading(load_files)


def _served(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def serve(*args: Any, **kwargs: Any) -> Any:
        with serving_all_ranks(), stage_3_unmentioned():
            return original(*args, **kwargs)

    return serve
