"""Where a model keeps its parameters, so that a parameter which takes the place of another one is seen."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.logging import warn_once
from deepspeed.zero.address import address_of, full_shape


class Places:
    """The parameters of a model by module and name, as they were when the engine was made.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, module, name, parameter)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def take_back(self) -> None:
        """Brings values back that came as other objects, as ``load_state_dict(assign=True)`` brings them.

        Nothing would train those: gradients, masters and hooks are those of the parameters that were there.
        """
        for path, module, name, parameter in self._places:
            present = module._parameters.get(name)
            if present is not parameter and isinstance(present, nn.Parameter):
                _take_back(path, module, name, parameter, present)


def _take_back(path: str, module: nn.Module, name: str, parameter: nn.Parameter, present: nn.Parameter) -> None:
    address = address_of(parameter)
    if address is None or address.bucket.is_sharded or present.shape != parameter.shape:
        warn_once(
            f"replaced:{path}",
            f"the parameter {path!r} was replaced by another one, of shape {tuple(present.shape)}, after "
            f"deepspeed.initialize; the engine goes on training the former one, of shape {full_shape(parameter)}. "
            "Replace parameters before initialize, or write into them",
            ranks=[-1],
        )
        return
    with torch.no_grad():
        parameter.copy_(present)
    module._parameters[name] = parameter
    warn_once(
        f"taken back:{path}",
        f"the parameter {path!r} was replaced by another object (by load_state_dict with assign, or an assignment); "
        "its values were copied into the one that is trained, at the cost of a copy",
        ranks=[-1],
    )
