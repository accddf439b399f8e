"""Packing weights that ``zero.Init`` has sharded: one layer whole at a time, and its codes sharded in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from deepspeed.zero.access.gathered import GatheredBlock
from deepspeed.zero.address import ShardedParameter, address_of, forget_address, mark_full, plain_class
from deepspeed.zero.construction.provisional import shard_parameters


@contextmanager
def whole_for_packing(name: str, module: nn.Module, layer: nn.Module) -> Iterator[bool]:
    """Gathers the parameters of ``module`` inside the context; afterwards those of ``layer`` and its bias are sharded.

    Does nothing to a layer that is whole anyway. Every rank that shares the parameters must enter it.

    Args:
        name: The name of the layer.
        module: The plain layer, whose weight is given up.
        layer: What takes its place, with parameters ``codes`` and ``scales``; packed inside.

    Yields:
        Whether something was sharded.
    """
    weight = cast("nn.Parameter", module.weight)
    address = address_of(weight)
    if address is None or not isinstance(weight, ShardedParameter):
        yield False
        return
    bucket = address.bucket
    bias = cast("nn.Parameter | None", module.bias)
    members = [(p, found) for p in (weight, bias) if p is not None and (found := address_of(p)) is not None]
    block = GatheredBlock(members, None)
    block.open()
    yield True
    kept = {key: cast("nn.Parameter", getattr(layer, key)) for key in ("codes", "scales")}
    if bias is not None and len(members) == 2:
        # Out of the slices that it shares with the weight, which are freed so.
        values = bias.detach().clone()
        block.give_back(restore=False)
        forget_address(bias)
        mark_full(bias, values, plain_class(bias))
        kept["bias"] = bias
    else:
        block.give_back(restore=False)
    with torch.no_grad():
        shard_parameters(
            list(kept.values()),
            [f"{name}.{key}" for key in kept],
            group=bucket.group,
            device=bucket.device,
            dtype=None,
            shard_device=bucket.shard.device,
        )
