"""Marks of a parameter: which ranks share it.

Called by all code that lays parameters out (an engine's buckets, ``zero.Init``) before anything moves. A parameter
carries one of these marks:

- ``put_in_group(parameters, name)``, or being built inside ``in_group(name)``, names a group that was declared with
  ``comm.job.declared_groups.define_group`` (this package's own layers do so);
- ``allreduce = False`` and ``group_name``, as mixture-of-experts programs set them, names a group in the same way;
- ``tensor_model_parallel`` or ``model_parallel``, as programs with tensor parallelism of their own set them, means that
  other ranks have other parts of the same parameter;
- ``parts.say_part`` does the same, and records which part it is;
- a parameter without any of them is the same on all ranks that hold this part of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.tiling.parts import has_part

CUT = "cut"
"""Name of the group of parameters that are cut over model-parallel ranks."""

SHARED = "shared base"
"""Name of the group of frozen parameters that are sharded at every stage, as stage 3 shards all."""

ROWS = "rows of embeddings"
"""The group of tables whose gradients are sent by rows (``sparse_gradients``)."""
OFFLOADED = "offloaded base"
"""Name of the group of frozen parameters that are sharded at every stage and, between uses, in another tier."""

_EXPERTS = "ep_size_"
_ALONE = "ep_size_1"  # mixture-of-experts programs' name of the group in which every rank has all experts
_MARK = "ds_group"
_building: list[str] = []


@dataclass(frozen=True)
class Description:
    """Describes a parameter before it has a place."""

    group: str = DATA  # name of the group of ranks that share it


def describe(name: str, parameter: torch.Tensor) -> Description:
    """Reads the marks of a parameter.

    Args:
        parameter: The parameter, of any shape; the group of :func:`in_group` is noted on it.

    Raises:
        DeepSpeedConfigError: The marks contradict each other.
        NotYetSupportedError: It is a ``DTensor``.
    """
    refuse_dtensor(name, parameter)
    if _building and not hasattr(parameter, _MARK):
        setattr(parameter, _MARK, _building[-1])
    group = getattr(parameter, _MARK, None)
    if group is None and getattr(parameter, "allreduce", True) is False:
        group = getattr(parameter, "group_name", None)
        if group is None:
            raise DeepSpeedConfigError(
                f"the parameter {name!r} has allreduce = False and no group_name, which names the ranks that share it. "
                "Set group_name to a group of deepspeed.comm.define_group, or leave allreduce out"
            )
    marks = (getattr(parameter, "tensor_model_parallel", False), getattr(parameter, "model_parallel", False))
    if group is None or group == _ALONE:
        is_cut = any(marks) or (group is None and has_part(parameter))
        return Description(CUT if is_cut else DATA)
    if any(marks) and str(group).startswith(_EXPERTS):  # an expert that is cut over tensor-parallel ranks
        group = cut_experts(str(group))
    return Description(str(group))


def cut_experts(name: str) -> str:
    """Returns the group name of experts cut over tensor-parallel ranks, from that of whole ones, ``ep_size_<n>``."""
    return f"{name}_cut"


def put_in_group(parameters: Iterable[torch.nn.Parameter], name: str) -> None:
    """Puts ``parameters`` into a declared group. Must be called before ``zero.Init`` or an engine takes them."""
    for parameter in parameters:
        setattr(parameter, _MARK, name)


@contextmanager
def in_group(name: str) -> Iterator[None]:
    """Assigns parameters that ``zero.Init`` shards inside to a group; of nested contexts the innermost counts."""
    _building.append(name)
    try:
        yield
    finally:
        _building.pop()


def refuse_dtensor(name: str, parameter: torch.Tensor) -> None:
    """Raises for a parameter, of any shape, that torch's tensor parallelism has cut already.

    Raises:
        NotYetSupportedError: It is a ``DTensor``.
    """
    torch_module = sys.modules.get("torch.distributed.tensor")  # importing it costs more than most models
    if torch_module is not None and isinstance(parameter, torch_module.DTensor):
        raise NotYetSupportedError(
            f"the parameter {name!r} is a DTensor ({parameter.placements}), but zero.Init takes ordinary parameters "
            "only. Give a model that parallelize_module or Transformers' tp_plan has cut to deepspeed.initialize "
            "without zero.Init, and do not call fully_shard: ZeRO shards by itself"
        )
