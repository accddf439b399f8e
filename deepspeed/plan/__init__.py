"""Plans a job without its machines: ``deepspeed.plan(model, config, nodes=..., ...)`` and the command ``ds_plan``.

The real engine runs one step as rank *r* of *N* on tensors without values, while memory and traffic are counted: once
for each kind of rank (``kinds``), as pipeline stages differ. Read ``simulation`` (the run), ``pipeline``
and ``simulated_stage`` (what a rank does in a step), ``environment``, ``simulated_hardware``, ``values`` and
``autocasting`` (the world around it), ``memory`` (the counting), then ``planner``, ``simulated_step``, ``result`` and
``show``. ``prediction`` estimates how long a step takes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.accelerator.devices": "DEVICES Device",
        "deepspeed.plan.machine": "Machine",
        "deepspeed.plan.decoder": "DecoderShape",
        "deepspeed.plan.prediction.layout": "ParallelLayout",
        "deepspeed.plan.result": "Plan Request",
        "deepspeed.plan.prediction.step": "PredictedStep StepSetup predict_step",
        "deepspeed.plan.api": "plan",
        "deepspeed.plan.prediction.search": "search_layouts",
    },
)


class _CallableModule(ModuleType):
    """``deepspeed.plan`` is a package and a function; calling it calls :func:`deepspeed.plan.api.plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from deepspeed.plan.api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
