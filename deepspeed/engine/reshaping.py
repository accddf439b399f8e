"""What ``initialize`` does to a model before its parameters get their places: cut, spread, tiled, marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.connect import shared_transport
from deepspeed.comm.mpu import Standing
from deepspeed.comm.transport import Transport
from deepspeed.config.sections.root import Root
from deepspeed.engine.model_compression import quantize_in_training
from deepspeed.engine.optimizers import exchange_parameters
from deepspeed.engine.parts import Client
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear.bases import shared_bases
from deepspeed.linear.parts import quantize_as_configured
from deepspeed.logging import log_dist
from deepspeed.parallel.expert.prepare import prepare_expert_layers
from deepspeed.parallel.sequence.offloaded import offload_checkpoints
from deepspeed.parallel.sequence.sharing import left_alone
from deepspeed.parallel.sequence.tiled_models import tile_model
from deepspeed.parallel.sequence.ulysses import adopt_model
from deepspeed.parallel.tensor.cutting import cut_model
from deepspeed.parallel.tensor.dtensors import adopt_dtensors
from deepspeed.zero.leaf import mark_leaf_modules
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
        counts the groups of parameters that several tensor ranks have alike, and that of shared bases.
    """
    quantize_in_training(root.quantize_training, client.model)
    client = _spread_experts(root, client, ranks, device)
    model = client.model
    tiles = root.sequence_parallel
    tile_model(
        model,
        mlp=tiles.tiled_mlp,
        loss=tiles.tiled_loss,
        tokens=tiles.tile_tokens,
        in_evaluation=tiles.evaluation == "loss",
    )
    if tiles.offload_checkpoints:
        offload_checkpoints(model)
    if ranks.sequence_size > 1 and mesh_is_ours:
        adopt_model(
            model,
            ranks.sequence_group,
            ranks.mesh,
            tiles.mode,
            tiles.evaluation,
            recompute_exchange=tiles.recompute_exchange,
        )
    data_first, timed = root.use_data_before_expert_parallelism, root.wall_clock_breakdown
    prepare_expert_layers(model, device, data_first=data_first, timed=timed)
    client = _with_new_parameters(client, adopt_dtensors(model, ranks.mesh, device))
    with left_alone(model):  # it is tried out before and after, each rank by itself
        tensor = cut_model(model, root.tensor_parallel, ranks.mesh, device)
    quantize_as_configured(model, root.weight_quantization)
    settle: Callable[[torch.device], None] | None = getattr(model, "settle", None)
    if callable(settle):
        settle(device)
    return client, ({} if tensor is None else tensor.counts) | shared_bases(model, ranks.data_size)


def _spread_experts(root: Root, client: Client, ranks: Standing, device: torch.device) -> Client:
    """Spreads the experts of a model that knows nothing of it, if that is asked for."""
    section = root.expert_parallel
    if section is None or not section.enabled:
        return client
    from deepspeed.parallel.expert.auto import spread_experts

    peers = shared_transport(ranks.zero_group, device=device, timeout=comm.default_timeout())
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
