"""Makes an engine anew on another number of ranks: the same object, the same model, other slices."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from deepspeed.engine.base import EngineBase
from deepspeed.engine.initialize import build_parts
from deepspeed.errors import DeepSpeedError
from deepspeed.logging import logger
from deepspeed.zero.address import address_of, forget_address
from deepspeed.zero.construction.modules import suspended


def take_apart(engine: EngineBase) -> None:
    """Ends an engine whose job is over. No other rank needs to come.

    Its parameters are full afterwards; those that were sharded are zeros until they are filled.
    """
    parameters = list(engine.module.parameters())
    try:
        engine.destroy()
    except (DeepSpeedError, RuntimeError) as error:  # what was in flight cannot arrive any more; all is freed anyway
        logger.log(logging.DEBUG, "elasticity: the former engine ended with %s", error)
    addresses = [address for parameter in parameters if (address := address_of(parameter)) is not None]
    for owner in {id(a.bucket.owner): a.bucket.owner for a in addresses if a.bucket.is_trained}.values():
        owner.destroy()  # one that was half built when a further member was lost
    for parameter in parameters:
        address = address_of(parameter)
        parameter.grad = None
        if address is None:
            continue
        if address.bucket.is_sharded:
            with torch.no_grad(), DisableTorchFunctionSubclass():
                parameter.__class__ = torch.nn.Parameter
                parameter.data = torch.zeros(address.shape, dtype=address.bucket.dtype, device=address.bucket.device)
        forget_address(parameter)


def build_again(engine: EngineBase) -> None:
    """Makes an engine anew on the process group that there is now. Every rank of the job must call it.

    New members call ``deepspeed.initialize`` meanwhile, which does the same.
    """
    client, config = engine._parts.client, engine.config
    before = {name: getattr(engine, name) for name in ("training",)}
    with suspended():
        parts = build_parts(client, config)
        kind: Any = type(engine)
        kind.__init__(engine, parts)
        engine.train(before["training"])
        parts.features.finish(engine, client.training_data)
