"""The ``ds_*`` attributes by which the ecosystem recognizes and reads partitioned parameters.

A parameter changes its class with every gather, so the attributes cannot live in a subclass, and stored in each
parameter they would have to be written with every gather and would be pickled with it. They are therefore computed
when they are read: descriptors on ``torch.nn.Parameter``, put there when the first partitioned parameter is made. For
every other parameter they raise ``AttributeError``, so that ``hasattr(parameter, "ds_id")`` distinguishes the two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from deepspeed.zero.access.external import external_parameters
from deepspeed.zero.access.gathered import gather_until_partition, partition
from deepspeed.zero.address import Address, ShardedParameter, State, address_of
from deepspeed.zero.construction.provisional import shard_parameters
from deepspeed.zero.gather.handles import bucket_of
from deepspeed.zero.group import BucketGroup


class ZeroParamType(Enum):
    """Kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """The states of a parameter: whether its values are on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class DeepSpeedTensorOverride(Enum):
    """Names what ``zero.Init`` overrides in tensor constructors."""

    dtype = 1
    device = 2


class _View:
    """An attribute computed from the parameter's address. Assigning to the name on one parameter replaces it there."""

    def __init__(self, name: str, compute: Callable[[torch.nn.Parameter, Address], Any]) -> None:
        self._name = name
        self._compute = compute

    def __get__(self, parameter: torch.nn.Parameter | None, kind: type | None = None) -> Any:
        if parameter is None:
            raise AttributeError(f"{self._name} exists on partitioned parameters only")
        address = address_of(parameter)
        if address is None or not address.bucket.is_partitioned:
            raise AttributeError(f"{self._name}: this parameter is not partitioned (ZeRO stage 3)")
        return self._compute(parameter, address)


def _status(parameter: torch.nn.Parameter, address: Address) -> ZeroParamStatus:
    if not isinstance(parameter, ShardedParameter):
        return ZeroParamStatus.AVAILABLE
    in_flight = address.bucket.state is State.GATHERING
    return ZeroParamStatus.INFLIGHT if in_flight else ZeroParamStatus.NOT_AVAILABLE


def _local_tensor(parameter: torch.nn.Parameter, address: Address) -> torch.Tensor:
    """Returns this rank's part of the flattened parameter, as a view: 1-D, possibly empty.

    All of it where it is resident.
    """
    bucket = address.bucket
    if not bucket.is_sharded:
        return parameter.detach().view(-1)
    fragment = bucket.fragment(address.tile)
    return bucket.shard[:0] if fragment is None else bucket.shard[fragment.in_slice]


def _local_numel(parameter: torch.nn.Parameter, address: Address) -> int:
    return _local_tensor(parameter, address).numel()


def _method(compute: Callable[..., Any]) -> Callable[[torch.nn.Parameter, Address], Any]:
    """Returns a view that is called: ``parameter.name(...)``."""

    def bind(parameter: torch.nn.Parameter, address: Address) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return compute(parameter, address, *args, **kwargs)

        return call

    return bind


def _summary(parameter: torch.nn.Parameter, address: Address) -> dict[str, Any]:
    return {
        "id": address.number,
        "name": address.name,
        "status": _status(parameter, address).name,
        "numel": parameter.numel(),
        "ds_numel": address.numel,
        "shape": tuple(parameter.shape),
        "ds_shape": address.shape,
        "requires_grad": parameter.requires_grad,
        "grad_shape": None if parameter.grad is None else tuple(parameter.grad.shape),
        "persist": not address.bucket.is_sharded,
        "active_sub_modules": address.active_modules,
        "ds_tensor.shape": tuple(_local_tensor(parameter, address).shape),
    }


def _chosen(parameter: torch.nn.Parameter, param_list: Iterable[torch.nn.Parameter] | None) -> list[torch.nn.Parameter]:
    if param_list is None:
        return [parameter]
    return [param_list] if isinstance(param_list, torch.nn.Parameter) else list(param_list)


def _all_gather(
    parameter: torch.nn.Parameter,
    address: Address,
    param_list: Iterable[torch.nn.Parameter] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> None:
    """Makes parameters full until ``partition``; every rank must call it. Always whole and at once."""
    gather_until_partition(_chosen(parameter, param_list))


def _partition(
    parameter: torch.nn.Parameter,
    address: Address,
    param_list: Iterable[torch.nn.Parameter] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Shards what ``all_gather`` made full.

    With ``has_been_updated`` each rank keeps its part of its present values.
    """
    partition(_chosen(parameter, param_list), keep_values=has_been_updated)


def _convert(parameter: torch.nn.Parameter, address: Address, param_list: Iterable[torch.nn.Parameter]) -> None:
    """Partitions further parameters as this one is."""
    bucket = address.bucket
    plain = [other for other in param_list if address_of(other) is None]
    names = [f"converted with {address.name}, {position}" for position in range(len(plain))]
    shard_parameters(plain, names, group=BucketGroup.over(bucket.transport), device=bucket.device, dtype=None)


_VIEWS: dict[str, Callable[[torch.nn.Parameter, Address], Any]] = {
    "ds_id": lambda parameter, address: address.number,
    "ds_shape": lambda parameter, address: torch.Size(address.shape),
    "ds_numel": lambda parameter, address: address.numel,
    "ds_numel_aligned": lambda parameter, address: address.numel,
    "ds_status": _status,
    "ds_tensor": _local_tensor,
    "ds_param_type": lambda parameter, address: ZeroParamType.PARTITIONED,
    "ds_persist": lambda parameter, address: not address.bucket.is_sharded,
    "ds_active_sub_modules": lambda parameter, address: address.active_modules,
    "ds_process_group": lambda parameter, address: address.bucket.transport.group,
    "ds_zero_partition_rank": lambda parameter, address: address.bucket.transport.rank,
    "ds_zero_partition_world_size": lambda parameter, address: address.bucket.transport.size,
    "partition_numel": _method(_local_numel),
    "aligned_size": _method(lambda parameter, address: address.numel),
    "padding_size": _method(lambda parameter, address: 0),
    "ds_summary": _method(_summary),
    "all_gather": _method(_all_gather),
    "all_gather_coalesced": _method(_all_gather),
    "partition": _method(_partition),
    "convert_to_zero_parameters": _method(_convert),
}


def _status_of_saved(tensor: torch.Tensor) -> ZeroParamStatus:
    """Returns the ``ds_status`` of a parameter's tensor that a custom autograd function finds in ``ctx.saved_tensors``.

    Under saved-tensor hooks torch hands out an ordinary tensor there, without the parameter's attributes; programs read
    its status to decide whether they must gather.
    """
    bucket = bucket_of(tensor)
    if bucket is None:
        raise AttributeError("ds_status exists on partitioned parameters and on what autograd saved of them only")
    return ZeroParamStatus.AVAILABLE if bucket.state is State.FULL else ZeroParamStatus.NOT_AVAILABLE


def _all_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Returns the names and parameters that a module owns, and the external ones that it uses."""
    return itertools.chain(module.named_parameters(recurse=False), external_parameters(module))


def mark_module(module: torch.nn.Module) -> None:
    """Gives ``ds_external_parameters()`` and ``all_parameters()`` to one module.

    In the module itself: attributes of ``torch.nn.Module`` that other modules do not have break programs that request
    everything in ``dir()``, as torch's compiler does.
    """
    module.__dict__["ds_external_parameters"] = functools.partial(external_parameters, module)
    module.__dict__["all_parameters"] = functools.partial(_all_parameters, module)
    if isinstance(module, torch.nn.RNNBase):
        module.__dict__["flatten_parameters"] = _stay_in_buckets


def _stay_in_buckets() -> None:
    """Replaces ``flatten_parameters``, which on CUDA moves the weights of a recurrent layer to other memory."""


def install_views() -> None:
    """Installs the attributes on ``torch.nn.Parameter``. Cheap to call again."""
    if "ds_id" not in torch.nn.Parameter.__dict__:
        for name, compute in _VIEWS.items():
            setattr(torch.nn.Parameter, name, _View(name, compute))
        # A property, because torch's compiler reads every name of the class and needs a setter beside each getter.
        torch.Tensor.ds_status = property(_status_of_saved)  # type: ignore[attr-defined]
