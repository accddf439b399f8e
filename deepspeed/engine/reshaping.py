"""What ``initialize`` does to a model before its parameters get their places: cut, spread, tiled, marked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import TENSOR as AXIS
from deepspeed.comm.job.mpu import Standing
from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.root import Root
from deepspeed.engine.model_compression import pace_quantization, quantize_in_training
from deepspeed.engine.optimizers import exchange_parameters
from deepspeed.engine.parts import Client
from deepspeed.engine.rooms import EXPERT, LINEAR, SEQUENCE, TENSOR, is_loaded, is_pipeline
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.gather.leaf import mark_leaf_modules
from deepspeed.zero.storage import distinct


def reshape_model(
    root: Root, client: Client, ranks: Standing, device: torch.device, *, mesh_is_ours: bool
) -> tuple[Client, Mapping[str, bool]]:
    """Changes the model as the configuration asks for, in place, before anything reads its parameters.

    Every rank must call it.

    Args:
        root: The configuration.
        client: What the caller handed in.
        ranks: Where this rank stands.
        device: Where the model is to be.
        mesh_is_ours: The ranks that share a sequence come from the configuration, not from the caller's mpu.

    Returns:
        What the caller handed in, with the parameters that are now in place of others; and, by name, whether this rank
        counts the groups of parameters that several tensor ranks have alike, and those of frozen bases.
    """
    quantize_in_training(root.quantize_training, client.model)
    pace_quantization(root, client.model)
    client = _spread_experts(root, client, ranks, device)
    model = client.model
    _share_sequences(root, model, ranks, mesh_is_ours=mesh_is_ours)
    _prepare_experts(root, model, device)
    client, counts = _cut_tensors(root, client, ranks, device)
    _quantize(root, model)
    settle: Callable[[torch.device], None] | None = getattr(model, "settle", None)
    if callable(settle):
        settle(device)
    return client, {**counts, **_groups_of_bases(model, ranks.data_size)}


def _share_sequences(root: Root, model: nn.Module, ranks: Standing, *, mesh_is_ours: bool) -> None:
    """What the section ``sequence_parallel`` makes of a model."""
    section = root.sequence_parallel
    pipeline: Any = model if is_pipeline(model) else None
    if section.tiled_mlp or section.tiled_loss:
        from deepspeed.parallel.sequence.tiled_models import tile_model

        tile_model(
            model,
            mlp=section.tiled_mlp,
            loss=section.tiled_loss,
            tokens=section.tile_tokens,
            in_evaluation=section.evaluation == "loss",
        )
    if section.offload_checkpoints:
        from deepspeed.parallel.sequence.offloaded import offload_checkpoints

        offload_checkpoints(model)
    if ranks.sequence_size > 1 and mesh_is_ours:
        from deepspeed.parallel.sequence.ulysses import adopt_model

        adopt_model(
            model,
            ranks.sequence_group,
            ranks.mesh,
            section.mode,
            section.evaluation,
            recompute_exchange=section.recompute_exchange,
            whole=pipeline.transformers_model if pipeline is not None else None,
        )
    if ranks.sequence_size > 1 and pipeline is not None:
        pipeline.share_loss(own_share=section.loss == "own_share")


def _prepare_experts(root: Root, model: nn.Module, device: torch.device) -> None:
    """Connects expert layers, and modules of the program's own that want to know the groups."""
    wants_groups = any(hasattr(type(module), "set_deepspeed_parallelism") for module in model.modules())
    is_stage = getattr(model, "is_part_of_model", False)  # the others may have some, and all make the groups together
    if is_loaded(EXPERT) or wants_groups or is_stage:
        from deepspeed.parallel.expert.prepare import prepare_expert_layers

        data_first, timed = root.use_data_before_expert_parallelism, root.wall_clock_breakdown
        prepare_expert_layers(model, device, data_first=data_first, timed=timed)


def is_cut(model: nn.Module) -> bool:
    """Whether the layers of the model are cut over ranks already."""
    if not is_loaded(TENSOR):
        return False
    from deepspeed.parallel.tensor import cutting

    return cutting.is_cut(model)


def _cut_tensors(
    root: Root, client: Client, ranks: Standing, device: torch.device
) -> tuple[Client, Mapping[str, bool]]:
    """Cuts layers over ranks, or takes a model that was cut; with the groups whose parameters several ranks have."""
    model = client.model
    if ranks.mesh.size(AXIS) > 1 and root.tensor_parallel.autotp_size <= 1:
        from deepspeed.parallel.tensor.marks import read_marks

        read_marks(model, ranks.mesh, device)
    if not (root.tensor_parallel.autotp_size > 1 or is_cut(model) or _may_have_dtensors()):
        return client, {}
    from deepspeed.parallel.tensor.cutting import cut_model
    from deepspeed.parallel.tensor.dtensors import adopt_dtensors

    client = _with_new_parameters(client, adopt_dtensors(model, ranks.mesh, device))
    with _each_rank_by_itself(model):  # it is tried out before and after
        tensor = cut_model(model, root.tensor_parallel, ranks.mesh, device)
    return client, {} if tensor is None else tensor.counts


def _may_have_dtensors() -> bool:
    return "torch.distributed.tensor" in sys.modules


def _each_rank_by_itself(model: nn.Module) -> AbstractContextManager[None]:
    """Within it no rank waits for those that share its sequences."""
    if not is_loaded(SEQUENCE):
        return nullcontext()
    from deepspeed.parallel.sequence.sharing import left_alone

    return left_alone(model)


def _quantize(root: Root, model: nn.Module) -> None:
    if root.weight_quantization is not None and root.weight_quantization.enabled:
        from deepspeed.linear.parts import quantize_as_configured

        quantize_as_configured(model, root.weight_quantization)


def _groups_of_bases(model: nn.Module, ranks: int) -> Mapping[str, bool]:
    if not is_loaded(LINEAR):
        return {}
    from deepspeed.linear.bases import groups_of_bases

    return groups_of_bases(model, ranks)


def spreads_experts(root: Root, model: nn.Module) -> int:
    """Returns over how many ranks the experts of the model are to be spread; 1 where they are spread already."""
    section = root.expert_parallel
    if section is None or not section.enabled:
        return 1
    from deepspeed.parallel.expert.auto import spread_modules

    return 1 if spread_modules(model) else section.autoep_size


def _spread_experts(root: Root, client: Client, ranks: Standing, device: torch.device) -> Client:
    """Spreads the experts of a model that knows nothing of it, if that is asked for."""
    section = root.expert_parallel
    if section is None or not section.enabled:
        return client
    from deepspeed.parallel.expert.auto import spread_experts

    peers = (
        Job.current()
        .axis_of(ranks.zero_group)
        .transport("outside engines", device=device, timeout=comm.default_timeout())
    )
    data_first = root.use_data_before_expert_parallelism
    exchanged = spread_experts(client.model, section, peers, device, data_first=data_first)
    return _with_new_parameters(client, exchanged)


def _with_new_parameters(client: Client, exchanged: Mapping[int, nn.Parameter]) -> Client:
    """Optimizer and parameter groups of the caller with the parameters that the model has now."""
    return replace(
        client,
        optimizer=exchange_parameters(client.optimizer, exchanged),
        model_parameters=exchange_parameters(client.model_parameters, exchanged),
    )


def mark_leaves(root: Root, model: nn.Module) -> None:
    """Marks the modules of ``zero_optimization.leaf_module``."""
    section = root.zero_optimization.leaf_module
    missing = mark_leaf_modules(model, classes=section.classes, names=section.names, suffixes=section.name_suffixes)
    if missing:
        raise DeepSpeedConfigError(
            f"zero_optimization.leaf_module: no module fits {', '.join(missing)}; names and name_suffixes are compared "
            "with those that model.named_modules() gives"
        )


def make_sparse(root: Root, model: nn.Module) -> None:
    """Gives a Transformers model the attention of the ``sparse_attention`` section, if that is asked for."""
    section = root.sparse_attention
    if section is None or section.apply_to != "model":
        return
    from deepspeed.ops.sparse_attention import build, transformers_models

    heads = transformers_models.heads_of(model)
    transformers_models.use_sparse_attention(model, build.pattern_of(section, heads))
    log_dist(f"sparse_attention: every attention layer of {type(model).__name__} follows the pattern {section.mode}")


@torch.no_grad()
def spread_buffers(model: nn.Module, transport: Transport) -> None:
    """Gives all ranks the buffers of rank 0, as bytes: backends know neither all dtypes nor strides."""
    for buffer in model.buffers():
        values = distinct(buffer)
        dense = values.contiguous()
        transport.broadcast(dense.view(-1).view(torch.uint8), 0, label="the buffers of rank 0")
        if dense is not values:
            values.copy_(dense)
