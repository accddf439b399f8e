"""Sequence parallelism for any Transformers model, through the library's own two registries.

The attention function gets queries, keys and values of this rank's tokens and attends to whole sequences by the
exchange. The mask function goes with it: it recognises masks instead of building them. Only the model that was
registered has the implementation's name in its configuration; other models of the process are left as they are.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transport import Transport
from deepspeed.comm.world import rank_in, size_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.sparse_attention.transformers_models import own_configurations
from deepspeed.parallel.sequence.attend import attend
from deepspeed.parallel.sequence.documents import Documents, document_numbers, documents_of
from deepspeed.parallel.sequence.exchange import exchange
from deepspeed.parallel.sequence.mixing import refuse_mixing_layers
from deepspeed.parallel.sequence.ring import ring_attention
from deepspeed.parallel.sequence.shares import length_of, shares_of_heads
from deepspeed.parallel.sequence.visible import Visible, checked_padding, given_mask, visible_by
from deepspeed.parallel.sequence.wire import wire_of

NAME = "deepspeed_sequence"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_PLACED = ("softcap", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of attention functions that say something of single tokens, or change scores in a way not done here."""


@dataclass
class Sharing:
    """How one model's sequences are shared.

    Attributes:
        model: The model whose ``training`` decides where evaluation is not sharded.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences.
        disable_in_eval: In evaluation the model is left to itself, with whole sequences on each rank.
        heads_group: The ranks among which heads are divided inside attention; None: keys and values go round instead.
        ring_group: The ranks around which keys and values go; None: they do not.
    """

    model: weakref.ref[nn.Module]
    group: Any
    core: str
    disable_in_eval: bool
    heads_group: Any
    ring_group: Any = None
    _gathered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _documents: list[tuple[tuple[int, int, int], Any]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether the model's present pass has parts of sequences."""
        model = self.model()
        return not self.disable_in_eval or model is None or model.training

    def wire(self, device: torch.device) -> Transport:
        """What carries the exchange."""
        return wire_of(self.group, device)

    def whole(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """``[batch, tokens]`` of whole sequences from this rank's part; gathered once for all layers of a pass.

        Kept by identity: all layers get the same tensor. A recomputation in backward finds it too.
        """
        if part is None:
            return None
        for known, whole in self._gathered:
            if known is part:
                return whole
        wire = self.wire(part.device)
        flat = part.new_empty(wire.size * part.numel())
        wire.my_slice(flat).copy_(part.reshape(-1))
        wire.all_gather(flat, key=wire.next_move(), label="position ids or padding mask (sequence parallel)").wait()
        whole = flat.view(wire.size, *part.shape).movedim(0, 1).reshape(part.size(0), -1)
        self._gathered = [*self._gathered[-7:], (part, whole)]
        return whole

    def documents(self, positions: torch.Tensor | None, visible: torch.Tensor | None, batch: int) -> Documents | None:
        """See ``documents_of``, once for all layers; both of whole sequences, as :meth:`whole` gave them."""

        def find() -> Documents | None:
            found = documents_of(positions, visible)
            return found * batch if found is not None and len(found) == 1 else found

        return self._once((id(positions), id(visible), batch), find)  # type: ignore[no-any-return]

    def numbers(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
        """See ``document_numbers``, likewise."""
        key = id(positions), id(visible), 0
        return self._once(key, lambda: document_numbers(positions, visible))  # type: ignore[no-any-return]

    def _once(self, key: tuple[int, int, int], find: Callable[[], Any]) -> Any:
        """The tensors of a key are alive as long as the list of what was gathered, which is the longer one."""
        for known, found in self._documents:
            if known == key:
                return found
        found = find()
        self._documents = [*self._documents[-3:], (key, found)]
        return found


_sharing: weakref.WeakKeyDictionary[nn.Module, Sharing] = weakref.WeakKeyDictionary()
_by_config: dict[int, tuple[Any, Sharing]] = {}


def share_sequences(model: nn.Module, group: Any, *, core: str | None = None, disable_in_eval: bool = False) -> None:
    """Makes a Transformers model attend to sequences of which each rank has a part, in place.

    From then on its forward wants this rank's tokens of every input, with their ``position_ids``.

    Args:
        model: A ``PreTrainedModel``, or one wrapped by PEFT.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences; None: the model's own.
        disable_in_eval: See :class:`Sharing`.

    Raises:
        DeepSpeedConfigError: The model cannot be switched, mixes tokens elsewhere, or has too few heads.
    """
    what = f"sequence parallel for {type(model).__name__}"
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or not hasattr(config, "get_text_config"):
        raise DeepSpeedConfigError(
            f"{what}: expected a Transformers model; build deepspeed.sequence.layer.DistributedAttention into a model "
            "of one's own"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise DeepSpeedConfigError(
            f"{what}: it attends from one sequence to another, which are cut differently; use models with "
            "self-attention only"
        )
    refuse_mixing_layers(model)
    core = core_of(config, core, what)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    own_configurations(model)
    set_implementation: Any = model.set_attn_implementation
    set_implementation(NAME)
    if model.config._attn_implementation != NAME:  # type: ignore[union-attr]
        raise DeepSpeedConfigError(
            f"{what}: the class does not take its attention from transformers' AttentionInterface, so it cannot be "
            "exchanged; use a model class that does"
        )
    sharing = Sharing(weakref.ref(model), group, core, disable_in_eval, heads_group=group)
    for module in model.modules():
        _sharing[module] = sharing
        own = getattr(module, "config", None)
        if hasattr(own, "_attn_implementation"):
            _by_config[id(own)] = own, sharing
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)


def core_of(config: Any, core: str | None, what: str) -> str:
    """The implementation that attends to whole sequences.

    Raises:
        DeepSpeedConfigError: It is unknown, or needs masks of tokens by tokens.
    """
    own = getattr(config, "_attn_implementation", None)
    core = core or (own if own not in (None, NAME) else "sdpa")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" in core and core not in ALL_ATTENTION_FUNCTIONS:
        from transformers.integrations.hub_kernels import load_and_register_attn_kernel

        load_and_register_attn_kernel(core)
    if core in ("eager", "paged|eager", "flex_attention"):
        raise DeepSpeedConfigError(
            f'{what}: the attention implementation "{core}" works on masks of tokens by tokens, whose size grows with '
            'the square of the length; use attn_implementation="sdpa" or a flash attention'
        )
    if core not in ALL_ATTENTION_FUNCTIONS:
        raise DeepSpeedConfigError(
            f'{what}: transformers knows no attention implementation "{core}"; known are '
            f"{', '.join(sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()))}"
        )
    return core


def sharing_of(model: nn.Module) -> Sharing | None:
    """How a model's sequences are shared; None if it was not registered."""
    return _sharing.get(model)


def _registered(found: Sharing | None) -> Sharing:
    if found is None:
        raise DeepSpeedConfigError(
            f'sequence parallel: a model has attn_implementation "{NAME}" and was not registered (a copy of one that '
            "was?); set its attention implementation, or register it too"
        )
    return found


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Without position ids a model counts from 0 on every rank."""
    if not _registered(_sharing.get(model)).is_on:
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


class _Seen:
    """An object with some attributes exchanged, for attention functions that read them from the layer."""

    def __init__(self, original: Any, **exchanged: Any) -> None:
        self.__dict__.update(exchanged, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _core_call(sharing: Sharing, module: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    groups = args[0].size(1) // args[1].size(1)
    config = _Seen(module.config, _attn_implementation=sharing.core)
    layer = _Seen(module, config=config, num_key_value_groups=groups)
    return ALL_ATTENTION_FUNCTIONS[sharing.core](layer, *args, **kwargs)


def _mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = None, config: Any = None, **kwargs: Any
) -> Any:
    """What the layers get for a mask; see :class:`Visible`. None: causal, and nothing is padding."""
    known, found = _by_config.get(id(config), (None, None))
    sharing = _registered(found if known is config else None)
    if not sharing.is_on:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        make = ALL_MASK_ATTENTION_FUNCTIONS[sharing.core]
        return make(attention_mask=attention_mask, mask_function=mask_function, config=config, **kwargs)
    seen = visible_by(mask_function)
    if attention_mask is not None:
        seen = replace(seen, padding=checked_padding(attention_mask, kwargs["q_length"]))
    return None if seen == Visible() else seen


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers asks for it. Every rank of the group must call it.

    Args:
        module: The layer.
        query: ``[batch, heads, this rank's tokens, width]``.
        key: ``[batch, key heads, this rank's tokens, width]``.
        value: As ``key``.
        attention_mask: Of :func:`_mask`, or this rank's part of a padding mask.
        scaling: Of the scores.
        dropout: Of the probabilities.
        is_causal: None: as the layer says.
        position_ids: Of this rank's tokens, ``[batch or 1, tokens]``; where they begin again a document begins.
        **kwargs: For the implementation that attends.

    Returns:
        ``[batch, this rank's tokens, heads, width]``, and None for the probabilities.
    """
    sharing = _registered(_sharing.get(module))
    if not sharing.is_on:
        more = {"scaling": scaling, "dropout": dropout, "position_ids": position_ids, **kwargs}
        if is_causal is not None:
            more["is_causal"] = is_causal
        return _core_call(sharing, module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    _refuse_what_is_placed(module, query, key, kwargs)
    seen = given_mask(attention_mask, query.size(2))
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if seen is None:
        seen = Visible(is_causal)
    elif isinstance(attention_mask, torch.Tensor):
        seen = replace(seen, is_causal=is_causal)
    positions, padding = sharing.whole(_two_axes(position_ids, module)), sharing.whole(seen.padding)
    if sharing.heads_group is None:
        return _round(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs), None
    group = sharing.heads_group
    shares = shares_of_heads(query.size(1), key.size(1), size_of(group))
    inside = [
        exchange(tensor, group, 2, 1, heads=heads)
        for tensor, heads in ((query, shares.query), (key, shares.key), (value, shares.key))
    ]
    if sharing.ring_group is not None:
        query, key, value = inside
        out = _round(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs)
        return exchange(out, group, 1, 2, back=True, heads=shares.query), None
    if kwargs.get("s_aux") is not None:  # one number per head
        start, end = shares.query[rank_in(group)]
        kwargs["s_aux"] = kwargs["s_aux"][start:end]
    if sharing.core == "sdpa":
        _refuse_sinks(module, kwargs)
        out = attend(
            *inside,
            documents=sharing.documents(positions, padding, query.size(0)),
            is_causal=seen.is_causal,
            window=seen.window,
            scale=scaling,
            dropout=dropout,
        ).transpose(1, 2)
    else:
        if padding is not None and bool(padding.all()):
            padding = None
        out = _core_call(
            sharing, module, *inside, padding, scaling=scaling, dropout=dropout, is_causal=seen.is_causal,
            position_ids=positions, **kwargs,
        )[0]  # fmt: skip
        out = out.reshape(*out.shape[:2], length_of(shares.query[rank_in(group)]), -1)
    return exchange(out, group, 1, 2, back=True, heads=shares.query), None


def _round(
    sharing: Sharing,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Visible,
    positions: torch.Tensor | None,
    padding: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention by the ring; ``[batch, tokens, heads, width]``."""
    _refuse_sinks(module, kwargs)
    if dropout:
        raise DeepSpeedConfigError(
            f"sequence_parallel.mode: {type(module).__name__} drops attention probabilities ({dropout}), which the "
            'ring does not; set the model\'s attention dropout to 0, or the mode to "ulysses"'
        )
    numbers = sharing.numbers(positions, padding)
    if numbers is not None:
        numbers = numbers.expand(query.size(0), -1)
    out = ring_attention(
        query, key, value, sharing.ring_group, documents=numbers, is_causal=seen.is_causal, window=seen.window,
        scale=scaling,
    )  # fmt: skip
    return out.transpose(1, 2)


def _two_axes(position_ids: torch.Tensor | None, module: nn.Module) -> torch.Tensor | None:
    if position_ids is not None and position_ids.dim() != 2:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} got position_ids of shape {tuple(position_ids.shape)}; "
            "expected [batch, tokens]. Positions of several axes (images) are not cut along the sequence"
        )
    return position_ids


def _refuse_what_is_placed(module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
    for name in _PLACED:
        if kwargs.get(name) is not None:
            raise DeepSpeedConfigError(
                f"sequence parallel: {type(module).__name__} gives its attention {name}, which is not had on a part of "
                "a sequence; train this model without sequence_parallel_size"
            )
    if query.size(2) != key.size(2):
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} has {query.size(2)} queries and {key.size(2)} keys, as when "
            "it generates with a cache; generate with disable_in_eval=True and model.eval()"
        )


def _refuse_sinks(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if kwargs.get("s_aux") is not None:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} has attention sinks, which there are not here; choose a flash "
            'attention that has them as the core, and sequence_parallel.mode "ulysses"'
        )
