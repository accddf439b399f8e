"""Sequence parallelism by the calls of Accelerate, the Trainer and training scripts (ALST, arXiv 2506.13996).

Any Transformers model gets it through the library's two registries. Only a registered model has the implementation's
name in its configuration; other models in the process are unchanged.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.axes import SEQUENCE, TENSOR
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job, backend_of, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import base_of, decoder_beside_towers, is_causal_lm, unwrapped
from deepspeed.models.attention import (
    NEEDS_WHOLE_MASKS,
    attention_name,
    check_use_of_attention,
    configured_modules,
    has_attention,
    known_attention_names,
    name_attention,
    names_attention,
    own_configurations,
    takes_attention_by_name,
    use_attention,
)
from deepspeed.models.building import read_configuration
from deepspeed.models.configurations import (
    attends_across_sequences,
    heads_of,
    is_library_config,
    kv_heads_of,
    name_or_path_of,
    text_config,
)
from deepspeed.models.layers import rope_types_of
from deepspeed.models.recurrent import mixing_by_name
from deepspeed.parallel.sequence import state
from deepspeed.parallel.sequence.context import (
    NAME,
    AttentionExchange,
    InputsOfPass,
    SequenceParallelContext,
    registered,
    remember,
    sharing_of,
)
from deepspeed.parallel.sequence.evaluation import share_evaluation
from deepspeed.parallel.sequence.exchange import shares_of_heads
from deepspeed.parallel.sequence.recurrent import mixers_of, share_states
from deepspeed.parallel.sequence.towers import cut_at_decoder
from deepspeed.parallel.sequence.transformers_attention import attention, mask
from deepspeed.parallel.sequence.unshared import check_first_forward
from deepspeed.uncompiled import uncompiled


class UlyssesSPAttentionHF:
    """Enables sequence parallelism of Transformers models."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Creates the process groups, and makes a model attend to sequences that ranks share. Every rank must call it.

        Args:
            model_name_or_path: The model, perhaps wrapped by PEFT; or the name of one that is loaded later and given to
                ``deepspeed.initialize``.
            core_attn_implementation: The implementation for whole sequences; None: the model's.
            sequence_parallel_size: Ranks that share a sequence. 1: no effect.
            micro_batch_size: Accepted without effect; batches may have any size.
            seq_length: Tokens of whole sequences; must be a multiple of the ranks.
            seq_length_is_variable: False: ``seq_length`` must be given.
            disable_in_eval: In evaluation the model gets whole sequences.
            max_length: Older name of ``seq_length``.

        Returns:
            The mpu for ``deepspeed.initialize``; None for 1.

        Raises:
            DeepSpeedConfigError: The model cannot be shared in this way; nothing was changed.
        """
        if sequence_parallel_size == 1:
            return None
        if sequence_parallel_size < 1:
            raise DeepSpeedConfigError(
                f"register_with_transformers(sequence_parallel_size={sequence_parallel_size}): expected the number of "
                "ranks that share a sequence, at least 1; 1 leaves the model unchanged"
            )
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise DeepSpeedConfigError(
                "register_with_transformers(seq_length_is_variable=False): seq_length is missing; give the tokens of a "
                "whole sequence"
            )
        if length is not None and length % sequence_parallel_size:
            raise DeepSpeedConfigError(
                f"register_with_transformers: sequences of {length} tokens cannot be cut into {sequence_parallel_size} "
                f"equal parts; choose a multiple of {sequence_parallel_size}"
            )
        if size_of() % sequence_parallel_size:
            state.initialize_sequence_parallel(sequence_parallel_size)  # raises with the reason
        if not hasattr(model_name_or_path, "config"):
            config = read_configuration(model_name_or_path)
            core_of(config, core_attn_implementation, f"sequence parallel for {model_name_or_path}")
            heads, kv_heads = heads_of(config), kv_heads_of(config)
            if heads is not None and kv_heads is not None:
                shares_of_heads(heads, kv_heads, sequence_parallel_size)
            state.initialize_sequence_parallel(sequence_parallel_size)
            _awaited.append(_RegisteredName(str(model_name_or_path), core_attn_implementation, disable_in_eval))
            return state
        state.initialize_sequence_parallel(sequence_parallel_size)
        group = groups.group_along("sequence")
        share_sequences(
            model_name_or_path,
            group,
            AttentionExchange(heads_group=group),
            core=core_attn_implementation,
            disable_in_eval=disable_in_eval,
        )
        return state


@dataclass(frozen=True)
class _RegisteredName:
    """The settings of a model that was registered by name."""

    name: str  # the hub id or folder that the program gave
    core: str | None  # the implementation that attends to whole sequences
    disable_in_eval: bool  # in evaluation the model is left to itself, with whole sequences on each rank


_awaited: list[_RegisteredName] = []
"""Models that were registered by name, in order, until ``initialize`` gets them."""


def _settings_of(model: Any) -> tuple[str | None, bool]:
    """Returns ``(core, disable_in_eval)`` of a model that may have been registered by name, and forgets the entry.

    A model is recognized by the name from which it was loaded. A model with another name gets the settings of the only
    entry, or those that all entries share.

    Raises:
        DeepSpeedConfigError: Several names were registered with different settings, and none is this model's.
    """
    if not _awaited:
        return None, False
    name = name_or_path_of(model)
    found = next((entry for entry in _awaited if entry.name == name), None)
    if found is None and len({(entry.core, entry.disable_in_eval) for entry in _awaited}) > 1:
        names = ", ".join(repr(entry.name) for entry in _awaited)
        raise DeepSpeedConfigError(
            f"initialize(model=<{type(model).__name__}>): expected a model loaded by one of the names that "
            "UlyssesSPAttentionHF.register_with_transformers got with different settings "
            f"({names}), found one of the name {name!r}. Register the model itself: "
            "register_with_transformers(model_name_or_path=<the model>, ...)"
        )
    found = found or _awaited[0]
    _awaited.remove(found)
    return found.core, found.disable_in_eval


def adopt_model(
    job: Job,
    model: nn.Module,
    group: Any,
    mesh: Mesh,
    mode: str,
    evaluation: str = "whole",
    *,
    recompute_exchange: bool = False,
    whole: nn.Module | None = None,
) -> None:
    """Shares the sequences of a Transformers model that ``initialize`` got, as configured.

    Every rank of the job must call it. An unregistered model is registered here, also inside a
    user's module or as layers of a pipeline. A module without a Transformers model is left unchanged; its first forward
    must exchange tokens. ``group`` are the ranks that share a sequence; ``whole`` is the Transformers model whose
    layers ``model``, a pipeline stage, has, None if it is complete. Other arguments are as in ``sequence_parallel``.

    Raises:
        DeepSpeedConfigError: The model cannot be shared in this way.
    """
    if recompute_exchange and mode != "ulysses":
        raise DeepSpeedConfigError(
            f'sequence_parallel.recompute_exchange with mode "{mode}": ring attention keeps its result in '
            'another order of tokens; set recompute_exchange to false, or mode to "ulysses"'
        )
    if whole is None:
        model = whole = sequence_model_in(model)
    found = sharing_of(model)
    if found is None and not takes_attention_by_name(whole):
        if mode != "ulysses":
            raise DeepSpeedConfigError(
                f'sequence_parallel.mode "{mode}": {type(model).__name__} is no Transformers model, so its own code '
                "chooses its attention (deepspeed.sequence.ring_attention for rings); leave the key out"
            )
        if recompute_exchange:
            raise DeepSpeedConfigError(
                f"sequence_parallel.recompute_exchange: {type(model).__name__} is no Transformers model; give its "
                "DistributedAttention recompute_exchange=True, and leave the key out"
            )
        if not getattr(model, "is_part_of_model", False):  # a pipeline stage may have no attention
            check_first_forward(job, model, group, mesh.size(SEQUENCE))
        return
    exchange = AttentionExchange(*_groups_of_mode(job, whole, group, mesh, mode), recompute=recompute_exchange)
    if found is not None:  # registered by the program
        found.exchange = exchange
    else:
        core, disable_in_eval = _settings_of(whole)
        if whole is model:
            found = share_sequences(model, group, exchange, core=core, disable_in_eval=disable_in_eval)
        else:
            found = share_layers(model, whole, group, exchange, core=core, disable_in_eval=disable_in_eval)
    ranks = mesh.size(SEQUENCE)
    if found.disable_in_eval and evaluation != "whole":
        share_evaluation(model, found, keeps_logits=evaluation == "logits")
    by_ring = 1 if exchange.ring_group is None else size_of(exchange.ring_group)
    log_dist(
        f"sequence parallel: {type(whole).__name__} attends to sequences that {ranks} ranks share (heads divided over "
        f"{ranks // by_ring}, keys and values passed around rings of {by_ring}); each rank's inputs are its own "
        "tokens of every sequence, with position_ids"
    )


def _groups_of_mode(job: Job, model: Any, group: Any, mesh: Mesh, mode: str) -> tuple[Any, Any]:
    """Returns the group that divides heads, and the group of the ring.

    Raises:
        DeepSpeedConfigError: The mode is unknown, or heads cannot be divided so.
    """
    if mode == "ring":
        return None, group
    if mode not in ("ulysses", "both"):
        raise DeepSpeedConfigError(
            f'sequence_parallel.mode "{mode}": expected "ulysses", "ring" or "both"; choose one of them'
        )
    heads, key_heads = heads_of(model.config), kv_heads_of(model.config)
    if heads is None or key_heads is None:
        return group, None
    cut = mesh.size(TENSOR)  # tensor parallelism divides heads too
    heads, key_heads = max(heads // cut, 1), max(key_heads // cut, 1)
    ranks = mesh.size(SEQUENCE)
    width = math.gcd(ranks, key_heads) if mode == "both" else ranks
    shares_of_heads(heads, key_heads, width)
    if width == ranks:
        return group, None
    if width == 1:
        return None, group
    split = mesh.split(SEQUENCE, "ring", ("heads", width))
    made = [
        job.process_groups.mine(
            split.groups(axis),
            backend=backend_of(),
            timeout=default_timeout(),
            why=f"attention along {axis}",
            owner="job",
        )
        for axis in ("heads", "ring")
    ]
    return made[0], made[1]


def share_sequences(
    model: nn.Module, group: Any, exchange: AttentionExchange, *, core: str | None, disable_in_eval: bool
) -> SequenceParallelContext:
    """Makes a Transformers model attend to sequences that are divided over ranks, in place.

    From then on its forward expects this rank's tokens of every input, with their ``position_ids``. A model with towers
    also expects whole images, and computes ``position_ids`` itself if they are left out. ``core`` is the implementation
    that attends to whole sequences; None: the model's own. :class:`SequenceParallelContext` explains the rest.

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
    entered = dict.fromkeys((model, inner, base_of(inner)))  # programs call any of them
    decoder = decoder_beside_towers(inner)
    if decoder is None:
        _refuse_towers(inner, what)
    shared = model if decoder is None else decoder
    core = _checked_core(shared, core, what)
    own_configurations(shared)
    use_attention(shared, NAME, attention, mask, what)
    sharing = SequenceParallelContext(weakref.ref(model), group, core, disable_in_eval, exchange)
    if decoder is None:
        _join(model, sharing, entered)
        return sharing
    remember(model, sharing)
    cut_at_decoder(list(entered), decoder)
    _join(decoder, sharing, [decoder])
    return sharing


def _refuse_towers(model: Any, what: str) -> None:
    """Raises if a model has other models beside its text model: they would attend to tokens of other ranks."""
    text = text_config(model.config)
    own = (type(model.config), type(text))
    towers = [type(one).__name__ for one in configured_modules(model) if type(one.config) not in own]
    if text is not model.config and towers:
        raise DeepSpeedConfigError(
            f"{what}: expected its decoder as language_model, or as text_model below a head, where {towers[0]} stands "
            "beside it; found neither. Train this model with sequence_parallel_size 1"
        )


def share_layers(
    pipeline: nn.Module,
    whole: nn.Module,
    group: Any,
    exchange: AttentionExchange,
    *,
    core: str | None,
    disable_in_eval: bool,
) -> SequenceParallelContext:
    """Makes a pipeline stage of a Transformers model attend to sequences that are divided over ranks, in place.

    ``pipeline`` has the layers of this stage; the first stage also has the modules before them. ``whole`` is the model
    with these layers, with values or without; equal on all ranks, left unchanged. Other arguments are as of
    :func:`share_sequences`.

    Raises:
        DeepSpeedConfigError: Raised on all ranks: the model cannot be switched, mixes tokens elsewhere, or has too few
            heads.
    """
    what = f"sequence parallel for a pipeline of {type(whole).__name__}"
    core = _checked_core(whole, core, what)
    check_use_of_attention(whole, NAME, attention, mask, what)
    own_configurations(pipeline)
    name_attention(pipeline, NAME)
    entered = [module for module in pipeline.modules() if takes_attention_by_name(module)]
    sharing = SequenceParallelContext(weakref.ref(pipeline), group, core, disable_in_eval, exchange)
    _join(pipeline, sharing, entered)
    return sharing


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
    """Registers ``sharing`` for all modules of ``model``; position ids are read where it is entered.

    Rotary embeddings choose their frequencies by whole sequences: types "dynamic" and "longrope" depend on the highest
    position in their input. So the highest position of the whole sequences is appended to this rank's positions, and
    its result is removed.
    """
    remember(model, sharing)
    for module in model.modules():
        if any("dynamic" in kind or kind == "longrope" for kind in rope_types_of(module)):
            give_base(module, _RotaryOfWholeSequences)
    share_states(model)

    @uncompiled
    def end_pass(model: nn.Module, _args: Any, _result: Any) -> None:
        registered(model).inputs = None

    for module in entered:
        module.register_forward_pre_hook(_begin_pass, with_kwargs=True)
        module.register_forward_hook(end_pass, always_call=True)


def sequence_model_in(model: nn.Module) -> nn.Module:
    """Returns the Transformers model whose sequences ranks share: the one inside ``model``, else ``model``.

    Raises:
        DeepSpeedConfigError: There are several and none was registered, or there are Transformers layers outside a
            model, which would attend to this rank's tokens only.
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
            f"{what}: it holds {len(inside)} Transformers models ({', '.join(map(repr, inside))}); name the "
            "shared one by UlyssesSPAttentionHF.register_with_transformers(model_name_or_path=<that one>, ...) before "
            "initialize"
        )
    return next(iter(inside.values()), model)


def core_of(config: Any, core: str | None, what: str) -> str:
    """Returns the implementation that attends to whole sequences.

    Raises:
        DeepSpeedConfigError: The implementation is unknown, or needs masks of tokens by tokens.
    """
    own = attention_name(config)
    core = core or (own if own not in (None, NAME) else "sdpa")
    is_known = has_attention(core)
    if core in NEEDS_WHOLE_MASKS:
        raise DeepSpeedConfigError(
            f'{what}: the attention implementation "{core}" works on masks of tokens by tokens, whose size grows with '
            'the square of the length; use attn_implementation="sdpa" or a flash attention'
        )
    if not is_known:
        raise DeepSpeedConfigError(
            f'{what}: transformers has no attention implementation "{core}"; choose one of '
            f"{', '.join(known_attention_names())}"
        )
    return core


@uncompiled
def _begin_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises without position ids (every rank would count from 0) or with labels that the model would shift itself."""
    sharing = registered(model)
    if not sharing.is_on:
        return
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # forward itself raises
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
    mask = given.get("attention_mask")
    padding = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    sharing.inputs = InputsOfPass(given["position_ids"], padding)


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raises if a layer needs neighboring tokens and is neither attention nor shared by :func:`share_states`.

    Raises:
        DeepSpeedConfigError: There is such a layer; the message names it.
    """
    found = list(mixing_by_name(model, mixers_of(model)))
    if found:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(model).__name__} mixes tokens outside of its attention function "
            f"({', '.join(found[:4])}{', ...' if len(found) > 4 else ''}) in layers whose states are not read from a "
            "cache of Transformers; such layers give wrong results on a part of a sequence, without an error. Train "
            "it without sequence_parallel_size"
        )


class _RotaryOfWholeSequences(nn.Module):
    """Mixin in front of a rotary embedding's class: appends the highest position of whole sequences to its input."""

    @uncompiled
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sharing = registered(self)
        if not sharing.is_on or position_ids.dim() != 2:
            return super().forward(x, position_ids, *args, **kwargs)
        whole = sharing.whole(position_ids)
        assert whole is not None
        highest = whole.amax().expand(position_ids.size(0), 1)
        made = super().forward(x, torch.cat((position_ids, highest), dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in made) if isinstance(made, tuple) else made[:, :-1]
