"""Adagrad for parameters in host memory, and torch's Adagrad for parameters that may be sharded already."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from deepspeed.ops.base import ElementwiseOptimizer
from deepspeed.ops.flat import AdagradRule


class Adagrad(torch.optim.Adagrad):
    """``torch.optim.Adagrad`` without state at construction; the engine makes it at the first update.

    Torch's class makes the state at construction, in the shapes of the parameters, but a parameter that ``zero.Init``
    has sharded is empty then. Arguments and results are those of torch. Outside an engine, use torch's class: ``step``
    needs the state.
    """

    __signature__ = inspect.signature(torch.optim.Adagrad)

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        probe = torch.optim.Adagrad([torch.zeros(1)], **settings)  # checks the settings
        self.__dict__.update({name: value for name, value in vars(probe).items() if name.startswith("_need")})
        torch.optim.Optimizer.__init__(self, params, probe.defaults)


class DeepSpeedCPUAdagrad(ElementwiseOptimizer):
    """Adagrad with fp32 state, for offloaded parameters (it works on any device).

    State (``sum``, ``step``) has the names and meaning of ``torch.optim.Adagrad``.

    Args:
        model_params: Parameters or group dictionaries; groups may carry keys of other optimizers.
        eps: Added to the root of the sum.
        weight_decay: Added to the gradient, times the parameter.
        amsgrad: Not available.
        fp32_optimizer_states: Keep the sum of 16-bit parameters in fp32; False keeps the parameter's dtype.
        adamw_mode: Without meaning for Adagrad; accepted because integrations pass it to every CPU optimizer.

    Raises:
        ValueError: ``amsgrad`` is requested, or a number is out of range.
    """

    _rule = AdagradRule()

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool | None = None,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, numbers, amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
