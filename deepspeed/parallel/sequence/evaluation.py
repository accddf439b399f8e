"""Evaluation with sequences shared as in training, so that sequences that fit in training fit in evaluation.

Accelerate and the Trainer evaluate whole batches: every rank passes its own and expects its own result. Each of
these batches is cut along the sequence and computed by all ranks, one batch after another; then its rank gets the loss
and the gathered logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import wrap_forward
from deepspeed.logging import log_dist_once
from deepspeed.models.anatomy import is_causal_lm, unwrapped
from deepspeed.models.configurations import model_type_of
from deepspeed.models.head import causal_output
from deepspeed.parallel.sequence.batches import BatchDescription, check, describe_batch, exchange_batches
from deepspeed.parallel.sequence.context import SequenceParallelContext
from deepspeed.parallel.sequence.loss import IGNORED

_CUT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Inputs with one value per token."""
_COUNTS_BY_MASK = ("opt",)
"""Model types that derive position ids from the padding mask if none are given."""
_NEUTRAL = ("return_dict", "use_cache", "num_items_in_batch")


def share_evaluation(model: nn.Module, sharing: SequenceParallelContext, *, keeps_logits: bool) -> None:
    """Makes the forward of a causal language model divide sequences between ranks in evaluation too, in place.

    Other models are left unchanged. Forwards in evaluation mode without gradients and without a cache are shared: all
    ranks of the group must run them together. Each rank generates by itself. Unless it ``keeps_logits``, with labels
    only the loss is returned.
    """
    if not is_causal_lm(unwrapped(model)):
        return

    def forward(model: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if model.training or torch.is_grad_enabled():
            return whole(*args, **kwargs)
        given = inspect.signature(whole).bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        if not _disables_cache(given, model):
            return whole(*args, **kwargs)
        found = _shared(whole, sharing, model, given, keeps_logits)
        return whole(*args, **kwargs) if found is None else found

    wrap_forward(model, forward)


def _disables_cache(given: dict[str, Any], model: Any) -> bool:
    """Returns whether this pass is an evaluation, not generation; equal on all ranks, without an exchange."""
    if given.get("past_key_values") is not None:
        return False
    uses = given.get("use_cache")
    if uses is None:
        uses = getattr(model.config, "use_cache", False) and given.get("labels") is None
    return not uses


def _shared(
    whole: Callable[..., Any],
    sharing: SequenceParallelContext,
    model: nn.Module,
    given: dict[str, Any],
    keeps_logits: bool,
) -> Any:
    """Returns the model's output for this rank's batch; None if some rank's batch cannot be shared."""
    axis = axis_of(sharing.group, SEQUENCE)
    ids = given.get("input_ids")
    problem, batch, more = _split_arguments(given, model)
    mine, tensors = (BatchDescription(problem=problem), {}) if problem else describe_batch(batch, axis.size)
    mine.others = more
    transport = axis.transport("layers", device=next(model.parameters()).device)
    descriptions = gather_objects(transport, mine, label="the batches of an evaluation (sequence parallel)")
    try:
        check(descriptions, "evaluation")
    except DeepSpeedConfigError as error:
        log_dist_once(
            "sequence parallel: each rank evaluates its batches by itself, as they cannot be divided over the "
            f"ranks. {error}"
        )
        return None
    assert isinstance(ids, torch.Tensor)
    sums, logits, dtype = [], None, torch.float32
    for rank, part in enumerate(exchange_batches(tensors, descriptions, axis, ids.device)):
        part = {name: value.to(ids.device) if name in tensors else value for name, value in part.items()}
        labels = part.get("shift_labels")
        with sharing.evaluating(part.get("position_ids")):
            found = whole(**part, labels=labels, use_cache=False, return_dict=True)
        if labels is not None:
            dtype = found.loss.dtype
            count, total = (labels != IGNORED).sum(), found.loss.float()
            if part.get("num_items_in_batch") is None:  # else the model has already divided by them
                total = torch.where(count > 0, total, torch.zeros_like(total)) * count
            sums.append(torch.stack((total, count.float())))
        if labels is None or keeps_logits:
            gathered = _gathered(found.logits, rank, sharing)
            logits = gathered if rank == axis.place else logits
        del found
    if logits is not None:
        logits = logits[:, : ids.size(1)]
    loss = None
    if sums:
        channel = axis.channel(ids.device)
        summed = channel.sum(torch.stack(sums), "the losses of an evaluation (sequence parallel)")
        total, count = summed[axis.place]
        loss = (total / count if more.get("num_items_in_batch") is None else total).to(dtype)
    return causal_output(given.get("return_dict"), loss=loss, logits=logits)


def _split_arguments(given: dict[str, Any], model: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """Returns why a batch cannot be shared (or an empty text), its inputs per token, and its other arguments."""
    batch = {name: given[name] for name in _CUT if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in _CUT and value is not None}
    rest = {name: value for name, value in rest.items() if name not in _NEUTRAL and value is not False}
    rest = {name: value for name, value in rest.items() if name != "logits_to_keep" or value != 0}
    if rest:
        return f"it has {', '.join(sorted(rest))}", {}, {}
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            return f"the model's configuration has {name}", {}, {}
    mask = batch.get("attention_mask")
    if mask is not None and batch.get("position_ids") is None and model_type_of(model) in _COUNTS_BY_MASK:
        batch["position_ids"] = (mask.cumsum(1) * mask - 1).long()  # -1 for padding, as the model would derive them
    items = given.get("num_items_in_batch")
    if items is None:
        return "", batch, {}
    return "", batch, {"num_items_in_batch": items.item() if isinstance(items, torch.Tensor) else items}


def _gathered(part: torch.Tensor, owner: int, sharing: SequenceParallelContext) -> torch.Tensor:
    """Returns ``[batch, tokens, words]`` of the whole sequences on rank ``owner``, nothing on the others."""
    transport = sharing.transport(part.device)
    source = part.movedim(1, 0).contiguous()  # tokens first, so that received parts are in place
    tokens = source.size(0)
    mine = transport.rank == owner
    sent, received = [0] * transport.size, [tokens * mine] * transport.size
    sent[owner] = tokens
    out = source.new_empty((sum(received), *source.shape[1:]))
    transport.all_to_all(source, sent, out, received, label="logits of an evaluation (sequence parallel)").wait()
    return out.movedim(0, 1)
