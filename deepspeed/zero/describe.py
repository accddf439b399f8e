"""What a parameter is: asked by whoever lays parameters out, before anything moves."""

from __future__ import annotations

import sys

import torch

from deepspeed.errors import NotYetSupportedError


def refuse_dtensor(name: str, parameter: torch.Tensor) -> None:
    """Raises for a parameter that torch's tensor parallelism has cut already.

    Args:
        name: Of the parameter, for the message.
        parameter: The parameter.

    Raises:
        NotYetSupportedError: It is a ``DTensor``.
    """
    torch_module = sys.modules.get("torch.distributed.tensor")  # importing it costs more than most models
    if torch_module is not None and isinstance(parameter, torch_module.DTensor):
        raise NotYetSupportedError(
            f"the parameter {name!r} is a DTensor ({parameter.placements}), as torch's parallelize_module, fully_shard "
            "and Transformers' tp_plan make them; expected an ordinary parameter. Give ZeRO the model before it is cut "
            "(it shards by itself), or cut layers by hand and describe the ranks by an mpu"
        )
