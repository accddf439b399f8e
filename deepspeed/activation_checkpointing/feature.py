"""The engine feature for ``activation_checkpointing.recompute_modules`` and ``activation_checkpointing.blocks``.

The first recomputes the inner part of attention in backward, the second whole repeated blocks, of which only the inputs
are saved.

Between the projections attention keeps scores and probabilities, whose size grows with the square of the length, and
computes little (`Korthikanti et al. <https://arxiv.org/abs/2205.05198>`_, section 5). Fused implementations keep no
scores; there recomputation saves the output of the attention only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.activation_checkpointing.checkpointing import checkpoint_heads
from deepspeed.activation_checkpointing.choice import RecomputationChoice
from deepspeed.comm.job.job import Job
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.engine_feature import STAGES, Conflict, EngineFeature, EngineHooks, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.logging import log_dist
from deepspeed.models.attention import (
    attention_names,
    check_wrapped_attention,
    interface_of,
    takes_attention_by_name,
    wrap_attention,
)
from deepspeed.models.checkpointing import recomputed_layers, switch_layer, switch_of
from deepspeed.models.masks import mask_of_implementation
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

KEY = "activation_checkpointing.recompute_modules"
_ENDING = "_recomputed"
BLOCKS = "activation_checkpointing.blocks"


def recompute_attention(job: Job, model: nn.Module, full_model: nn.Module | None = None) -> None:
    """Makes attention modules recompute their inner part in backward, in place.

    They are those of a Transformers model, or modules with a method ``recompute_core_attention(recompute)``, which
    calls ``recompute(function, *tensors)`` from then on where it called ``function(*tensors)``.

    Args:
        model: The model, a wrapper of it, or a pipeline stage with its layers.
        full_model: Model of Transformers from which the stage ``model`` was made, with values or without; None:
            ``model`` is not a stage, or was not made from one.

    Raises:
        DeepSpeedConfigError: There are no such modules, or the classes of a Transformers model do not take their
            attention by name.
    """
    if full_model is None and _recompute_own(job, model):
        return
    inside = [module for module in model.modules() if takes_attention_by_name(module)]
    outermost = full_model if full_model is not None else next(iter(inside), None)
    if outermost is None:
        raise DeepSpeedConfigError(
            f"{KEY}: expected a Transformers model, whose attention can be replaced, or modules with a method "
            f"recompute_core_attention, found {type(model).__name__}. Call deepspeed.checkpointing.checkpoint "
            "around the attention in the model's own code, or leave the key out"
        )
    check_wrapped_attention(outermost, _ENDING, _functions, KEY)
    config: Any = outermost.config
    if getattr(config, "reorder_and_upcast_attn", False) and "eager" in attention_names(outermost):
        raise DeepSpeedConfigError(
            f"{KEY}: reorder_and_upcast_attn computes attention in the layer itself, which cannot be replaced; "
            "set it to false, or leave the key out"
        )
    wrap_attention(model, _ENDING, _functions)


def _recompute_own(job: Job, model: nn.Module) -> bool:
    """Enables recomputation in modules with ``recompute_core_attention``; returns whether any rank has one."""
    for module in _own(model):
        module.recompute_core_attention(checkpoint_heads)
    return offers_recomputation(job, model)


def _own(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "recompute_core_attention")]


def offers_recomputation(job: Job, model: nn.Module) -> bool:
    """Returns whether modules of the model have ``recompute_core_attention``; every rank of a pipeline must call it."""
    own = _own(model)
    if not getattr(model, "is_part_of_model", False):
        return bool(own)
    transport = job.axis_of().transport("outside engines", device=torch.device("cpu"), timeout=default_timeout())
    return any(gather_objects(transport, len(own), label=f"the attention modules of the stages ({KEY})"))


def _functions(name: str) -> tuple[Any, Any]:
    """Returns the attention and the mask function that replace those of an implementation."""
    return functools.partial(_attend, name), functools.partial(mask_of_implementation, name)


def _attend(
    name: str, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
) -> Any:
    """Computes attention of ``[batch, heads, tokens, width]`` by the implementation ``name``."""
    attention = functools.partial(interface_of(name, layer), layer)
    if not torch.is_grad_enabled():
        return attention(query, key, value, mask, **more)
    return checkpoint_heads(attention, query, key, value, mask, **more)


class _RecomputedBlock(nn.Module):
    """Mixin in front of a block's class: a call of the block saves only its inputs while ``recomputes`` is true."""

    recomputes: bool
    context_fn: Any  # chooses what is kept; None: only the inputs

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Around the call, not the forward: what is compiled, of either, must be compiled in recomputation too.
        from torch.utils.checkpoint import checkpoint

        if not self.recomputes:
            return super().__call__(*args, **kwargs)
        more = {} if self.context_fn is None else {"context_fn": self.context_fn}
        return checkpoint(super().__call__, *args, use_reentrant=False, **more, **kwargs)


_KEPT = (
    "mm addmm bmm baddbmm _grouped_mm _scaled_mm _scaled_grouped_mm _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward"
).split()
"""Operations whose results cost much time and little memory: products and attention."""


def keeping(names: Sequence[str]) -> Any:
    """Returns torch's contexts for recomputation of everything but some operations (:func:`kept_operations`)."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return functools.partial(create_selective_checkpoint_contexts, kept_operations(names))


def kept_operations(names: Sequence[str]) -> list[Any]:
    """Returns the operations of torch whose results selective recomputation keeps.

    Args:
        names: Operations such as ``aten.mm``; none: products, grouped products and attention.

    Raises:
        DeepSpeedConfigError: Torch has no operation of a name.
    """
    kept: list[Any] = []
    for name in names or [f"aten.{each}" for each in _KEPT]:
        space, _, operation = name.removeprefix("torch.ops.").partition(".")
        packet = getattr(getattr(torch.ops, space), operation.partition(".")[0], None) if operation else None
        if packet is None and names:
            raise DeepSpeedConfigError(
                f'activation_checkpointing.keep: expected operations of torch such as "aten.mm", found {name!r}; '
                "correct the name"
            )
        if packet is not None:
            kept += [getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")]
    return kept


class BlockCheckpointing:
    """Makes every repeated block save only its inputs and recompute the rest in backward; can be switched off again.

    A model of Transformers has methods for that; in other models the children of each ``ModuleList`` are the blocks.

    Args:
        context_fn: Chooses what is kept beside the inputs (:func:`keeping`); None: nothing.

    Raises:
        DeepSpeedConfigError: There is no repeated block.
    """

    def __init__(self, model: nn.Module, context_fn: Any = None) -> None:
        self._model, self._context_fn = model, context_fn
        self._blocks: list[nn.Module] = []
        if switch_of(model, "enable") is not None:
            return
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._blocks = [block for blocks in lists for block in blocks if next(block.parameters(), None) is not None]
        if not self._blocks:
            raise DeepSpeedConfigError(
                "activation checkpointing of blocks: expected a model with repeated blocks (children of a ModuleList), "
                f"found none in {type(model).__name__}; call deepspeed.checkpointing.checkpoint in its forward instead"
            )

    def on(self) -> None:
        """Switches it on. Models of Transformers recompute in training mode only, which the caller must set.

        Raises:
            DeepSpeedConfigError: The model's own method fails.
        """
        if switch_of(self._model, "enable") is not None:
            self._call_own("enable")
            return
        for block in self._blocks:
            recomputed = give_base(block, _RecomputedBlock)
            recomputed.recomputes, recomputed.context_fn = True, self._context_fn

    def off(self) -> None:
        """Restores the model to its state before :meth:`on`.

        Raises:
            DeepSpeedConfigError: The model's own method is missing or fails.
        """
        if switch_of(self._model, "enable") is not None:
            self._call_own("disable")
            return
        for block in self._blocks:
            give_base(block, _RecomputedBlock).recomputes = False

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that activation checkpointing recomputes, in the order of the model."""
        return self._blocks or recomputed_layers(self._model)

    @staticmethod
    def switch(block: nn.Module, is_on: bool) -> None:
        """Switches the recomputation of one of :attr:`blocks`."""
        if isinstance(block, _RecomputedBlock):
            block.recomputes = is_on
        else:
            switch_layer(block, is_on)

    def _call_own(self, verb: str) -> None:
        method = switch_of(self._model, verb)
        try:
            if method is None:
                raise AttributeError(f"it has no gradient_checkpointing_{verb}")
            if verb == "enable" and self._context_fn is not None:
                method({"use_reentrant": False, "context_fn": self._context_fn})
            else:
                method()
        except Exception as error:  # the model's own code may raise anything
            raise DeepSpeedConfigError(
                f"activation checkpointing: {type(self._model).__name__}.gradient_checkpointing_{verb}() "
                f"failed: {error}. Correct the model's method, or switch activation checkpointing off"
            ) from error


def _is_on(setup: EngineSetup) -> bool:
    return bool(setup.root.activation_checkpointing.recompute_modules)


def _has_blocks(setup: EngineSetup) -> bool:
    return bool(setup.root.activation_checkpointing.blocks)


def _blocks(setup: EngineSetup, how: bool | str) -> BlockCheckpointing:
    keep = setup.root.activation_checkpointing.keep
    return BlockCheckpointing(setup.model, keeping(keep) if how == "selective" else None)


class SelectiveCheckpointing(EngineFeature):
    """Blocks, or parts of them, that run again in backward."""

    title = "recomputation by configuration"
    setting = f"{KEY}, {BLOCKS}"
    conflicts = (
        Conflict(
            BLOCKS,
            _has_blocks,
            STAGES,
            "a PipelineModule checkpoints its layers itself",
            "set pipeline.activation_checkpoint_interval instead",
        ),
    )

    @override
    def prepare(self, setup: EngineSetup) -> None:
        if not _is_on(setup):
            return
        model: Any = setup.model
        full_model = model.transformers_model if setup.has_stages else None
        if setup.ranks.sequence_size == 1 or (full_model is None and offers_recomputation(setup.job, model)):
            # Otherwise sequence parallelism does it, between the exchanges.
            recompute_attention(setup.job, model, full_model)

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if not _has_blocks(setup):
            return
        if _is_on(setup):
            raise DeepSpeedConfigError(
                f"{BLOCKS} and {KEY}: whole blocks are recomputed already; leave one of the two out"
            )
        _blocks(setup, setup.root.activation_checkpointing.blocks)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        if _has_blocks(setup):
            _blocks(setup, setup.root.activation_checkpointing.blocks).on()
        return {}

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        section = setup.root.activation_checkpointing
        if section.blocks != "auto":
            return None
        checkpointing = _blocks(setup, "auto")
        if not checkpointing.blocks:
            log_dist(f"{BLOCKS}: full of auto, as layers of {type(setup.model).__name__} cannot be switched one by one")
            return None
        axis = setup.job.axis_of()
        transport = axis.transport("outside engines", device=torch.device("cpu"), timeout=default_timeout())

        def apply(name: str) -> None:
            made = _blocks(setup, name)
            (made.off if name == "none" else made.on)()

        def greatest(numbers: list[int]) -> list[int]:
            rows = gather_objects(transport, numbers, label=f"the memory of the ranks ({BLOCKS})")
            return [max(column) for column in zip(*rows, strict=True)]

        kept = frozenset(kept_operations(section.keep))
        return RecomputationChoice(checkpointing.blocks, checkpointing.switch, kept, apply, greatest)


FEATURE = SelectiveCheckpointing()
