"""Takes the parameters of a model out of an engine, each into storage of its own."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import address_of

_OF_ENGINES = ("ds_", "_ds_")  # beginnings of the names of attributes that engines set on parameters


def is_sharded(model: nn.Module) -> bool:
    """Returns whether an engine shards parameters of ``model`` (ZeRO stage 3), small ones that stay whole included."""
    found = (address_of(parameter) for parameter in model.parameters())
    return any(address is not None and address.bucket.is_partitioned for address in found)


@torch.no_grad()
def own_parameters(model: nn.Module) -> None:
    """Replaces every parameter that is a view of a larger storage, or sharded, by a copy with storage of its own.

    ``torch.save`` writes whole storages, and an engine's parameters are views of buckets. Tied parameters stay tied. A
    parameter that has its storage to itself and belongs to no engine stays the same object; copies have the attributes
    that others have set on the former ones. Gathers one module at a
    time; where parameters are sharded, every rank of the engine must call it.

    Args:
        model: Changed in place. Its engine keeps the former parameters, so it can train the model no further.
    """
    copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the former one is kept, so that its id stays its own
    for module in model.modules():
        held = {name: p for name, p in module._parameters.items() if p is not None and not _owns_its_storage(p)}
        with GatheredParameters([parameter for parameter in held.values() if id(parameter) not in copies]):
            for name, parameter in held.items():
                if id(parameter) not in copies:
                    copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    marks = {key: mark for key, mark in vars(parameter).items() if not key.startswith(_OF_ENGINES)}
                    vars(copy).update(marks)
                    copies[id(parameter)] = (copy, parameter)
                module._parameters[name] = copies[id(parameter)][0]


def _owns_its_storage(parameter: nn.Parameter) -> bool:
    if address_of(parameter) is not None:
        return False
    return parameter.is_meta or parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
