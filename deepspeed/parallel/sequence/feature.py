"""Long sequences as an engine feature: shares them between ranks, and computes them in tiles.

It also offloads the inputs that checkpointed layers of a Transformers model save for backward to host memory (ALST,
arXiv 2506.13996). The library itself does the checkpointing; its saved tensors are moved to the host, and fetched when
a layer is recomputed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.activation_checkpointing.feature import offers_recomputation
from deepspeed.axes import SEQUENCE
from deepspeed.comm.job.job import Job
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base, wrap_forward
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import output_head, unwrapped
from deepspeed.models.checkpointing import checkpoint_layers, replace_checkpoint_functions
from deepspeed.models.head import changes_behind_head, forward_by_losses, has_plain_head, token_losses_of
from deepspeed.offload.activations import HostActivations
from deepspeed.parallel.sequence import state
from deepspeed.parallel.sequence.context import sharing_of
from deepspeed.parallel.sequence.tiled import tiled
from deepspeed.parallel.sequence.ulysses import adopt_model
from deepspeed.parallel.sequence.vocabulary import chunked_cross_entropy


class SequenceParallelism(EngineFeature):
    """Sequences of which each rank has a part, and layers that compute a sequence chunk by chunk."""

    title = "sequence parallelism"
    setting = "sequence_parallel_size, sequence_parallel"

    @override
    def read_config(self, config: Any, mpu: Any) -> Any:
        return with_all_data_ranks(config, mpu)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        section, ranks = setup.root.sequence_parallel, setup.ranks
        stages: Any = setup.model if setup.has_stages else None
        if section.tiled_mlp or section.tiled_loss:
            tile_model(
                setup.model,
                mlp=section.tiled_mlp,
                loss=section.tiled_loss,
                tokens=section.tile_tokens,
                in_evaluation=section.evaluation == "loss",
            )
        if section.offload_checkpoints:
            offload_checkpoints(setup.model, setup.device)
        if ranks.mesh.size(SEQUENCE) == 1:
            return {}
        if setup.mesh_is_ours:
            adopt_model(
                setup.job,
                setup.model,
                ranks.sequence_group,
                ranks.mesh,
                section.mode,
                section.evaluation,
                recompute_exchange=section.recompute_exchange,
                whole=stages.transformers_model if stages is not None else None,
            )
        if setup.root.activation_checkpointing.recompute_modules:
            recompute_between_exchanges(setup.job, setup.model)
        if stages is not None:
            stages.share_loss(own_share=section.loss == "own_share")
        return {}


FEATURE = SequenceParallelism()


def with_all_data_ranks(config: Any, mpu: Any) -> Any:
    """Returns the configuration with the total batch size of all data ranks, if it was computed for one of them.

    Accelerate computes ``train_batch_size`` from its own sizes, which may lack the number of data ranks. Arguments are
    those of ``initialize``.
    """
    if mpu is not state or not isinstance(config, dict):
        return config
    data = state.get_data_parallel_world_size()
    total, *parts = (config.get(name) for name in (TOTAL, MICRO, ACCUMULATION))
    if data == 1 or not isinstance(total, int) or not all(isinstance(part, int) for part in parts):
        return config
    if total != math.prod(parts):  # type: ignore[arg-type]
        return config
    log_dist(
        f"{TOTAL} {total} is the batch of one data-parallel rank, but there are {data} of them; {total * data} is used "
        "(ranks that share sequences count once)"
    )
    return {**config, TOTAL: total * data}


def recompute_between_exchanges(job: Job, model: nn.Module) -> None:
    """Makes a registered model recompute attention in backward, without repeating the exchanges of tokens.

    Raises:
        DeepSpeedConfigError: The model is not registered and has no ``recompute_core_attention``, or uses a ring.
    """
    key = "activation_checkpointing.recompute_modules"
    found = next((one for module in model.modules() if (one := sharing_of(module)) is not None), None)
    if found is None:
        if getattr(model, "is_part_of_model", False) or offers_recomputation(job, model):
            return
        raise DeepSpeedConfigError(
            f"{key} where ranks share sequences: expected a Transformers model, or modules with a method "
            f"recompute_core_attention, found {type(model).__name__}. Call deepspeed.checkpointing.checkpoint in its "
            "own code, or leave the key out"
        )
    if found.exchange.ring_group is not None:
        raise DeepSpeedConfigError(
            f"{key}: ring attention (sequence_parallel.mode) keeps no scores, and would send keys and values "
            'again in backward; leave the key out, or set the mode to "ulysses"'
        )
    if found.exchange.recompute:
        log_dist(f"sequence_parallel.recompute_exchange has no effect beside {key}: attention's result is not kept")
    found.recompute_core = True


def offload_checkpoints(model: nn.Module, device: torch.device) -> None:
    """Enables checkpointing of a Transformers model's layers, and keeps their saved tensors on the host; in place.

    Raises:
        DeepSpeedConfigError: The model does not support checkpointed layers.
    """
    inner = unwrapped(model)
    if not checkpoint_layers(inner):
        raise DeepSpeedConfigError(
            f"sequence_parallel.offload_checkpoints: {type(inner).__name__} is no Transformers model with checkpointed "
            "layers; call deepspeed.checkpointing.checkpoint with activation_checkpointing.cpu_checkpointing in the "
            "model's own code, or set it to false"
        )

    store = HostActivations(device)

    def keep_on_host(model: nn.Module, _args: Any) -> None:
        replace_checkpoint_functions(model, lambda one: one if isinstance(one, _OnHost) else _OnHost(one, store))

    # In every pass, as the program may enable checkpointing again, with its own functions.
    model.register_forward_pre_hook(keep_on_host)
    log_dist(
        f"sequence_parallel.offload_checkpoints: the inputs of {type(inner).__name__}'s layers are kept in host memory"
    )


class _OnHost:
    """A checkpoint function whose saved tensors are kept on the host."""

    def __init__(self, function: Any, store: HostActivations) -> None:
        self._function, self._store = function, store

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._store.block():
            return self._function(*args, **kwargs)


def tile_model(model: nn.Module, *, mlp: bool, loss: bool, tokens: int, in_evaluation: bool = False) -> None:
    """Makes a Transformers model (perhaps wrapped by PEFT) compute its MLPs or its loss tile by tile, in place.

    ``in_evaluation`` tiles the loss in evaluation too; its outputs then have no logits.

    Raises:
        DeepSpeedConfigError: The model has no such MLP or loss.
    """
    inner = unwrapped(model)
    if mlp:
        _tile_mlps(inner, tokens)
    if loss:
        _tile_loss(inner, tokens, in_evaluation)


def _tile_mlps(model: nn.Module, tokens: int) -> None:
    found = [module for module in model.modules() if _is_mlp(module)]
    if not found:
        raise DeepSpeedConfigError(
            f"sequence_parallel.tiled_mlp: {type(model).__name__} has no module whose class ends in MLP and takes one "
            "tensor; call TiledMLP in the model's own code, or set it to false"
        )
    for module in found:
        give_base(module, _Tiled).__dict__["tile_tokens"] = tokens
    log_dist(f"sequence_parallel.tiled_mlp: {len(found)} MLPs are computed {tokens:,} tokens at a time")


class _Tiled(nn.Module):
    """Mixin in front of an MLP's class: its forward runs on tiles of ``tile_tokens`` tokens, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tiled(super().forward, x, max(-(-x.size(-2) // self.__dict__["tile_tokens"]), 1))


def _is_mlp(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("MLP"):
        return False
    needed = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return len(needed) == 1


def _tile_loss(model: Any, tokens: int, in_evaluation: bool) -> None:
    what = f"sequence_parallel.tiled_loss: {type(model).__name__}"
    if not has_plain_head(model):
        raise DeepSpeedConfigError(
            f"{what} is no causal language model of transformers; call deepspeed.sequence.chunked_cross_entropy in the "
            "model's own code, or set it to false"
        )
    behind = changes_behind_head(model.config)
    if behind:
        raise DeepSpeedConfigError(
            f"{what} changes its logits or its loss behind the head ({', '.join(behind)}), which a loss of hidden "
            "states would leave out; set tiled_loss to false"
        )

    def forward(model: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = inspect.signature(whole).bind(*args, **kwargs).arguments
            kwargs.update(kwargs.pop("kwargs", {}))
        if not (model.training or in_evaluation) or (
            kwargs.get("labels") is None and kwargs.get("shift_labels") is None
        ):
            return whole(**kwargs)
        head = _head_with_losses(output_head(model), tokens)
        return forward_by_losses(model, lambda hidden, labels: head(hidden, labels=labels), **kwargs)

    wrap_forward(model, forward)
    log_dist(
        f"{what} computes its loss {tokens:,} tokens at a time; outputs with labels have no logits "
        f"in training{' and evaluation' * in_evaluation}"
    )


def _head_with_losses(head: Any, tokens: int) -> Any:
    """Returns the head, changed so that one call returns the losses of ``labels``.

    One call for all tiles, so its weights are gathered once, also if lengths differ between ranks.
    """
    plain = head.forward
    if getattr(plain, "gives_losses", False):
        return head

    @functools.wraps(plain)
    def forward(hidden: torch.Tensor, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if labels is None:
            return plain(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        return chunked_cross_entropy(
            hidden, plain, labels, tile_tokens=tokens, reduction="none", token_losses=token_losses_of(head)
        )

    forward.gives_losses = True  # type: ignore[attr-defined]
    head.forward = forward
    return head
