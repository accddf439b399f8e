"""Packs weights that ``zero.Init`` has sharded: gathers one layer at a time, and shards its codes instead."""

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
def gather_for_packing(name: str, module: nn.Module, layer: nn.Module) -> Iterator[bool]:
    """Gathers the parameters of ``module`` inside the context; at its end shards those of ``layer``, and the bias.

    Does nothing if the weight is not sharded. Every rank that shares the parameters must enter the context.

    Args:
        layer: Its replacement, with parameters ``codes`` and ``scales``, which the caller packs inside the context.

    Yields:
        Whether the weight was sharded.
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
    packed = {key: cast("nn.Parameter", getattr(layer, key)) for key in ("codes", "scales")}
    if bias is not None and len(members) == 2:
        # Takes the bias out of the slices that it shares with the weight, so that these are freed.
        values = bias.detach().clone()
        block.give_back(restore=False)
        forget_address(bias)
        mark_full(bias, values, plain_class(bias))
        packed["bias"] = bias
    else:
        block.give_back(restore=False)
    with torch.no_grad():
        shard_parameters(
            list(packed.values()),
            [f"{name}.{key}" for key in packed],
            group=bucket.group,
            device=bucket.device,
            dtype=None,
            shard_device=bucket.shard.device,
        )
