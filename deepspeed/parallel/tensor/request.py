"""``tp_model_init`` and ``set_autotp_mode``: tensor parallelism requested by calls instead of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.job.job import is_initialized, rank_in
from deepspeed.comm.start.process_group import get_all_ranks_from_group
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.engine_feature import mark
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once

_REQUEST = "_ds_tensor_request"


@dataclass(frozen=True)
class TensorParallelRequest:
    """Arguments of one call of :func:`tp_model_init`."""

    size: int  # ranks that share a layer
    dtype: torch.dtype | None  # the model's type
    config: dict[str, Any] | None  # a ``tensor_parallel`` section or a whole configuration, or None
    ranks: tuple[int, ...] | None  # the ranks of the given process group, or None


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Requests that ``initialize`` cuts a model over ``tp_size`` ranks, neighbors in the job. Cuts nothing yet.

    Args:
        dtype: The model's compute dtype; must equal the configured one.
        config: The configuration, or its ``tensor_parallel`` section; keys that it lacks are taken from that of
            ``initialize``.
        tp_group: Torch process group of the ranks that share layers with this one: the ``tp_size`` neighbors.

    Returns:
        ``model``.

    Raises:
        DeepSpeedConfigError: An earlier call had other values, or the arguments contradict each other.
    """
    if not isinstance(tp_size, int) or tp_size < 1:
        raise DeepSpeedConfigError(f"tp_model_init(tp_size={tp_size!r}): expected a number of ranks, 1 or more")
    ranks = None if tp_group is None else tuple(get_all_ranks_from_group(tp_group))
    if ranks is not None and len(ranks) != tp_size:
        raise DeepSpeedConfigError(
            f"tp_model_init: tp_size is {tp_size}, but tp_group has the {len(ranks)} ranks {list(ranks)}; give a group "
            "of as many"
        )
    section = config.get("tensor_parallel", config) if isinstance(config, dict) else None
    made = TensorParallelRequest(tp_size, dtype, section, ranks)
    known = model.__dict__.get(_REQUEST)
    if known is not None and known != made:
        raise DeepSpeedConfigError(f"tp_model_init: it was called before, with {known}; now with {made}. Call it once")
    model.__dict__[_REQUEST] = made
    mark(model, "deepspeed.parallel.tensor.feature")
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Does nothing. Upstream chooses here between layers for training and for inference; this package has one kind."""
    log_dist_once(
        f"set_autotp_mode(training={training}) changes nothing: layers that are cut serve training and inference alike"
    )


def merged(root: Root, model: nn.Module, mpu: Any = None) -> Root:
    """Returns the configuration together with the arguments of :func:`tp_model_init` for ``model``.

    Raises:
        DeepSpeedConfigError: They contradict each other.
    """
    request: TensorParallelRequest | None = model.__dict__.get(_REQUEST)
    section = root.tensor_parallel
    if request is None:
        return root
    if section.autotp_size not in (0, request.size):
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size is {section.autotp_size}, but tp_model_init was called with tp_size "
            f"{request.size}; give the same number, or leave the key out"
        )
    if request.ranks is not None and mpu is not None:
        raise DeepSpeedConfigError(
            "tp_model_init(tp_group=...) and initialize(mpu=...) both choose the ranks that share layers; give one"
        )
    wanted = torch.bfloat16 if root.bf16.enabled else torch.float16 if root.fp16.enabled else None
    if wanted is not None and request.dtype is not None and request.dtype not in (wanted, torch.float32):
        raise DeepSpeedConfigError(
            f"tp_model_init(dtype={request.dtype}): the configuration has {wanted}; give the same, or leave dtype out"
        )
    keys = {key: value for key, value in (request.config or {}).items() if key not in section.model_fields_set}
    parsed = TensorParallel.model_validate(keys | {"autotp_size": request.size})
    update = {key: getattr(parsed, key) for key in parsed.model_fields_set}
    return root.model_copy(update={"tensor_parallel": section.model_copy(update=update)})


def group_was_given(model: nn.Module) -> bool:
    """Returns whether :func:`tp_model_init` was given the ranks that share the layers of a model."""
    request: TensorParallelRequest | None = model.__dict__.get(_REQUEST)
    return request is not None and request.ranks is not None


def check_group(model: nn.Module, ranks: list[int]) -> None:
    """Compares the group that a program gave with the one of the mesh.

    Raises:
        DeepSpeedConfigError: The two groups have different ranks.
    """
    request: TensorParallelRequest | None = model.__dict__.get(_REQUEST)
    if request is not None and request.ranks is not None and sorted(request.ranks) != sorted(ranks):
        me = rank_in() if is_initialized() else 0
        raise DeepSpeedConfigError(
            f"tp_model_init(tp_group=...): rank {me} shares layers with the ranks {sorted(ranks)}, as neighbors do, "
            f"but the group holds {sorted(request.ranks)}; lay the ranks out by initialize(mesh_param=<DeviceMesh>)"
        )
