"""The engine feature ``fused_loss``: causal Transformers models compute their loss without whole logits.

One call of the head computes the losses, so its weight is gathered once, and the model's own forward does the rest:
labels, routers' losses and the divisor. What the model does to logits between head and loss is applied to the losses
instead: a factor, and a softcap.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.engine_feature import STAGES, Conflict, EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import output_head, unwrapped
from deepspeed.models.head import IGNORED, logits_change, loss_function_of, takes_loss_function, use_loss_function
from deepspeed.ops.fused_loss import linear_cross_entropy


def _is_on(setup: EngineSetup) -> bool:
    section = setup.root.tensor_parallel
    of_cut_head = section.vocab_parallel_ce_backend == "liger" and section.vocab_parallel_lm_head
    return setup.root.fused_loss or bool(of_cut_head and not setup.has_stages)


class FusedLoss(EngineFeature):
    """The loss of a causal language model without whole logits."""

    title = "fused loss"
    setting = "fused_loss"
    conflicts = (
        Conflict(
            "fused_loss",
            lambda setup: setup.root.fused_loss,
            STAGES,
            "the last stage computes the loss from the logits of its head",
            "leave it out",
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if not _is_on(setup):
            return
        if setup.root.sequence_parallel.tiled_loss:
            raise DeepSpeedConfigError(
                "fused_loss and sequence_parallel.tiled_loss: both compute the loss from hidden states. Leave "
                "tiled_loss out, which computes the head's product twice"
            )
        _check(setup.model)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        if _is_on(setup):
            fuse_loss(setup.model)
        return {}


FEATURE = FusedLoss()


def _check(model: nn.Module) -> Any:
    """Returns the causal language model in ``model``.

    Raises:
        DeepSpeedConfigError: It has no head or loss that can be computed together.
    """
    inner = unwrapped(model)
    head = output_head(inner)
    if not isinstance(head, nn.Linear) or not takes_loss_function(inner, with_inputs=True):
        raise DeepSpeedConfigError(
            "fused_loss: expected a causal Transformers model whose head is a torch.nn.Linear, found "
            f"{type(inner).__name__} with the head {type(head).__name__}. Leave the key out, and "
            "call deepspeed.ops.linear_cross_entropy in the model's own code"
        )
    return inner


def fuse_loss(model: nn.Module) -> None:
    """Makes a causal Transformers model, or one wrapped by PEFT, compute its loss without logits in training, in place.

    Raises:
        DeepSpeedConfigError: The model has no such head or loss.
    """
    inner = _check(model)
    head: Any = output_head(inner)
    give_base(inner, _FusedModel)
    give_base(head, _FusedHead).__dict__["_fused_labels"] = None
    use_loss_function(inner, _FusedCausalLoss(head, loss_function_of(inner)))
    log_dist(f"fused_loss: {type(inner).__name__} computes its loss without logits; outputs with labels have none then")


class _FusedModel(nn.Module):
    """Mixin in front of a causal language model's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self
        if not self.training:
            return super().forward(*args, **kwargs)
        if args:
            bound = inspect.signature(super().forward).bind(*args, **kwargs).arguments
            args, kwargs = (), {**bound, **bound.pop("kwargs", {})}
        labels, ignore_index = kwargs.get("shift_labels"), kwargs.get("ignore_index", IGNORED)
        if labels is None and kwargs.get("labels") is not None:
            labels = nn.functional.pad(kwargs["labels"], (0, 1), value=ignore_index)[..., 1:]
        if labels is None:
            return super().forward(**kwargs)
        head: Any = output_head(inner)
        pending = head.__dict__["_fused_labels"] = _LabelState(labels, ignore_index, *logits_change(inner.config))
        try:
            outputs = super().forward(**kwargs)
        finally:
            head.__dict__["_fused_labels"] = None
        if pending.total is None:
            return outputs  # the head computed other positions than those of the labels
        if isinstance(outputs, tuple):
            return outputs[:1] + outputs[2:]
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})


@dataclass
class _LabelState:
    """Labels for which the head is about to compute the sum of losses."""

    labels: torch.Tensor
    ignore_index: int
    factor: float
    softcap: float | None
    total: torch.Tensor | None = None

    def check(self, logits: torch.Tensor, model: str) -> None:
        """Raises if the model has not changed what stood for its logits, ones, as its configuration says."""
        expected = self.factor if self.softcap is None else self.softcap * math.tanh(self.factor / self.softcap)
        found = float(logits.flatten()[0])
        if not math.isclose(found, expected, rel_tol=1e-2):
            raise DeepSpeedConfigError(
                f"fused_loss: {model} changes its logits behind the head in a way that its configuration does not "
                f"state (1 becomes {found:g}, expected {expected:g}). Leave the key out"
            )


class _FusedHead(nn.Linear):
    """Mixin in front of a head's class: computes the sum of losses of the labels that the model's forward has left."""

    compiles_itself = True  # its loss is compiled on a device, and hands a sum to the loss function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pending: _LabelState | None = self.__dict__["_fused_labels"]
        if pending is None or hidden.shape[:-1] != pending.labels.shape:
            return super().forward(hidden)
        cut: Any = getattr(self, "tensor_cut", None)
        parts: dict[str, Any] = {}
        if cut is not None:
            ((low, _),) = cut.split.intervals(cut.channel.rank)
            parts = {"channel": cut.channel, "low": low, "vocabulary": cut.split.extent}
            # The gather of tokens that tensor ranks share sums the gradient in its backward.
            parts["sums_hidden_gradient"] = cut.sequence is None or not cut.sequence.is_cut
        scaled = hidden if pending.factor == 1 else hidden * pending.factor
        how: dict[str, Any] = {"ignore_index": pending.ignore_index, "softcap": pending.softcap, "reduction": "sum"}
        pending.total = linear_cross_entropy(scaled, self.weight, pending.labels, self.bias, **how, **parts)
        return hidden.detach().new_ones((*hidden.shape[:-1], 1))  # stands for logits in the model's own forward


class _FusedCausalLoss:
    """The loss function of a model: the sum that its head has computed, or the one that it had."""

    def __init__(self, head: nn.Module, whole: Any) -> None:
        self._head, self._whole = head, whole
        self._is_checked = False

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Returns the 0-dim loss, 0 where no label counts; the arguments are those of Transformers' loss."""
        pending: _LabelState | None = self._head.__dict__["_fused_labels"]
        if pending is None or pending.total is None:
            more.update(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return self._whole(logits=logits, labels=labels, vocab_size=vocab_size, **more)
        if not self._is_checked:  # once: on a device it waits for the forward
            pending.check(logits, type(self._head).__name__)
            self._is_checked = True
        divisor = num_items_in_batch
        if divisor is None:
            divisor = (pending.labels != ignore_index).sum().clamp(min=1)
        return pending.total / (divisor.to(pending.total.device) if isinstance(divisor, torch.Tensor) else divisor)
