"""Sequence parallelism for any Transformers model, through the library's own two registries.

Only the model that was registered has the implementation's name in its configuration; other models of the process are
left as they are.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.anatomy import base_of, decoder_beside_towers, is_causal_lm, unwrapped
from deepspeed.models.attention import (
    NEEDS_WHOLE_MASKS,
    attention_name,
    check_use_of_attention,
    known_attention_names,
    knows_attention,
    name_attention,
    names_attention,
    own_configurations,
    takes_attention_by_name,
    use_attention,
)
from deepspeed.models.configurations import attends_across_sequences, is_library_config
from deepspeed.parallel.sequence.context import NAME, SequenceParallelContext, registered, remember, sharing_of
from deepspeed.parallel.sequence.mixing import refuse_mixing_layers
from deepspeed.parallel.sequence.rotary import know_whole_sequences
from deepspeed.parallel.sequence.towers import cut_at_decoder
from deepspeed.parallel.sequence.transformers_attention import attention, mask
from deepspeed.uncompiled import uncompiled


def share_sequences(model: nn.Module, group: Any, *, core: str | None = None, disable_in_eval: bool = False) -> None:
    """Makes a Transformers model attend to sequences of which each rank has a part, in place.

    From then on its forward wants this rank's tokens of every input, with their ``position_ids``. A model with towers
    wants this rank's tokens too, and whole images; it numbers positions itself where ``position_ids`` are left out.

    Args:
        model: A ``PreTrainedModel``, or one wrapped by PEFT.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences; None: the model's own.
        disable_in_eval: See :class:`SequenceParallelContext`.

    Raises:
        DeepSpeedConfigError: The model cannot be switched, mixes tokens elsewhere, or has too few heads.
    """
    what = f"sequence parallel for {type(model).__name__}"
    config: Any = getattr(model, "config", None)
    if not takes_attention_by_name(model) or not is_library_config(config):
        raise DeepSpeedConfigError(
            f"{what}: expected a Transformers model; build deepspeed.sequence.layer.DistributedAttention into a model "
            "of one's own"
        )
    inner = unwrapped(model)
    entered = dict.fromkeys((model, inner, base_of(inner)))  # programs call each of them
    decoder = decoder_beside_towers(inner)
    shared = model if decoder is None else decoder
    core = _checked_core(shared, core, what)
    own_configurations(shared)
    use_attention(shared, NAME, attention, mask, what)
    sharing = SequenceParallelContext(weakref.ref(model), group, core, disable_in_eval, heads_group=group)
    if decoder is None:
        _join(model, sharing, entered)
        return
    remember(model, sharing)
    cut_at_decoder(list(entered), decoder)
    _join(decoder, sharing, [decoder])


def share_layers(
    pipeline: nn.Module, whole: nn.Module, group: Any, *, core: str | None = None, disable_in_eval: bool = False
) -> None:
    """Makes a pipeline stage of a Transformers model attend to sequences of which each rank has a part, in place.

    Args:
        pipeline: Has this stage's layers; the first stage also has what comes before them.
        whole: The model that they are from, with values or without; equal on all ranks, and left as it is.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences; None: the model's own.
        disable_in_eval: See :class:`SequenceParallelContext`.

    Raises:
        DeepSpeedConfigError: On all ranks: the model cannot be switched, mixes tokens elsewhere, or has too few heads.
    """
    what = f"sequence parallel for a pipeline of {type(whole).__name__}"
    core = _checked_core(whole, core, what)
    check_use_of_attention(whole, NAME, attention, mask, what)
    own_configurations(pipeline)
    name_attention(pipeline, NAME)
    entered = [module for module in pipeline.modules() if takes_attention_by_name(module)]
    _join(
        pipeline,
        SequenceParallelContext(weakref.ref(pipeline), group, core, disable_in_eval, heads_group=group),
        entered,
    )


def _checked_core(model: Any, core: str | None, what: str) -> str:
    """Returns :func:`core_of` the model; raises where layers other than self-attention need tokens of other ranks."""
    config = model.config
    if attends_across_sequences(config):
        raise DeepSpeedConfigError(
            f"{what}: it attends from one sequence to another, which are cut differently; use models with "
            "self-attention only"
        )
    refuse_mixing_layers(model)
    return core_of(config, core, what)


def _join(model: nn.Module, sharing: SequenceParallelContext, entered: Iterable[nn.Module]) -> None:
    """Makes how sequences are shared known to all modules of ``model``; position ids are read where it is entered."""
    remember(model, sharing)
    know_whole_sequences(model)
    for module in entered:
        module.register_forward_pre_hook(_begin_pass, with_kwargs=True)
        module.register_forward_hook(_end_pass, always_call=True)


def sequence_model_in(model: nn.Module) -> nn.Module:
    """The Transformers model whose sequences ranks share: ``model``, or the one inside it; ``model`` if there is none.

    Raises:
        DeepSpeedConfigError: There are several and none was registered, or there are Transformers layers without the
            model that they are from. Left alone, they would attend to this rank's tokens only.
    """
    if sharing_of(model) is not None or takes_attention_by_name(model):
        return model
    inside: dict[str, nn.Module] = {}
    loose: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if sharing_of(module) is not None:
            return module
        if takes_attention_by_name(module):
            inside[name] = module
        elif names_attention(getattr(module, "config", None)):
            loose.append(f"{name!r} ({type(module).__name__})")
    what = f"sequence parallel for {type(model).__name__}"
    if loose:
        raise DeepSpeedConfigError(
            f"{what}: {loose[0]} takes its attention from Transformers, but is no part of one of its models here, so "
            "it would attend to this rank's tokens only. Give initialize the whole model, or in stages by "
            "PipelineModule.from_transformers, or leave sequence_parallel_size out"
        )
    if len(inside) > 1:
        raise DeepSpeedConfigError(
            f"{what}: it holds {len(inside)} Transformers models ({', '.join(map(repr, inside))}); say whose sequences "
            "are shared by UlyssesSPAttentionHF.register_with_transformers(model_name_or_path=<that one>, ...) before "
            "initialize"
        )
    return next(iter(inside.values()), model)


def core_of(config: Any, core: str | None, what: str) -> str:
    """Returns the implementation that attends to whole sequences.

    Raises:
        DeepSpeedConfigError: It is unknown, or needs masks of tokens by tokens.
    """
    own = attention_name(config)
    core = core or (own if own not in (None, NAME) else "sdpa")
    is_known = knows_attention(core)
    if core in NEEDS_WHOLE_MASKS:
        raise DeepSpeedConfigError(
            f'{what}: the attention implementation "{core}" works on masks of tokens by tokens, whose size grows with '
            'the square of the length; use attn_implementation="sdpa" or a flash attention'
        )
    if not is_known:
        raise DeepSpeedConfigError(
            f'{what}: transformers knows no attention implementation "{core}"; known are '
            f"{', '.join(known_attention_names())}"
        )
    return core


@uncompiled
def _begin_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Without position ids a model counts from 0 on every rank; labels that it shifts itself end with each part."""
    sharing = registered(model)
    if not sharing.is_on:
        return
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # forward itself will say what is wrong
        return
    given = {**given, **given.get("kwargs", {})}
    if given.get("position_ids") is None:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(model).__name__} was called without position_ids, so every rank would count its "
            "tokens from 0; give those of this rank's tokens (UlyssesSPDataLoaderAdapter does)"
        )
    inner = unwrapped(model)
    kind = type(inner).__name__
    if given.get("labels") is not None and given.get("shift_labels") is None and is_causal_lm(inner):
        raise DeepSpeedConfigError(
            f"sequence parallel: {kind} was called with labels and without shift_labels; it would shift them itself, "
            "and the label of this rank's last token is on the next rank. Give shift_labels, each token's next one "
            "(UlyssesSPDataLoaderAdapter does), and put the loss together by deepspeed.sequence.mean_loss"
        )
    sharing.given_positions = given["position_ids"]


@uncompiled
def _end_pass(model: nn.Module, _args: Any, _result: Any) -> None:
    registered(model).given_positions = None
