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

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.accelerator.devices import DEVICES as DEVICES
    from deepspeed.accelerator.devices import Device as Device
    from deepspeed.plan.api import plan as plan
    from deepspeed.plan.decoder import DecoderShape as DecoderShape
    from deepspeed.plan.machine import Machine as Machine
    from deepspeed.plan.prediction.layout import ParallelLayout as ParallelLayout
    from deepspeed.plan.prediction.search import search_layouts as search_layouts
    from deepspeed.plan.prediction.step import PredictedStep as PredictedStep
    from deepspeed.plan.prediction.step import StepSetup as StepSetup
    from deepspeed.plan.prediction.step import predict_step as predict_step
    from deepspeed.plan.result import Plan as Plan
    from deepspeed.plan.result import Request as Request

lazy_names(__name__)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from deepspeed.plan.api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
