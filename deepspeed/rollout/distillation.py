"""On-policy distillation: a student learns from a teacher on the student's own responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from typing_extensions import Self

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.rollout.base import RolloutBatch


@dataclass
class ResponseTokenBatch:
    """The tokens of responses, as targets of causal logits."""

    input_ids: torch.Tensor  # int64 ``[responses, length]``, prompts included
    attention_mask: torch.Tensor  # int64, of the same shape
    target_ids: torch.Tensor  # int64 ``[responses, tokens]``: from the first token of the response to the end
    response_mask: torch.Tensor  # int64, like ``target_ids``: 1 where the response goes on, its end token included

    @classmethod
    def from_rollout(cls, batch: RolloutBatch) -> Self:
        """Returns the response tokens of a rollout."""
        start = batch.response_start_idx
        ids, mask = batch.input_ids, batch.attention_mask
        return cls(ids, mask, ids[:, start:], mask[:, start:])

    def select_causal_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits ``[responses, tokens, vocabulary]`` that foretell ``target_ids``.

        Args:
            logits: ``[responses, length, vocabulary]``, of ``input_ids``.
        """
        count = self.target_ids.shape[1]
        return logits[:, -count - 1 : -1]


@dataclass
class DistillationLoss:
    """A loss over response tokens."""

    loss: torch.Tensor  # 0-dim fp32: the mean over tokens that count, 0 where none does
    loss_sum: torch.Tensor  # 0-dim fp32
    valid_token_count: torch.Tensor  # 0-dim int64


def generalized_jsd_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    response_mask: torch.Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> DistillationLoss:
    """Returns the generalized Jensen-Shannon divergence (`Agarwal et al. <https://arxiv.org/abs/2306.13649>`_, eq. 1).

    Args:
        student_logits: ``[..., vocabulary]``.
        teacher_logits: The same shape; gets no gradient.
        response_mask: ``[...]``, 1 for tokens that count.
        beta: 0: KL(teacher, student). 1: KL(student, teacher). Between: ``beta KL(teacher, m) + (1 - beta)
            KL(student, m)`` with the mixture ``m = (1 - beta) student + beta teacher``.
        temperature: Divides both logits; the loss is not multiplied by its square.
        teacher_top_k: Both distributions are those over the teacher's ``k`` most likely tokens; None: over all.
        pointwise_clip: Upper bound of each vocabulary entry's summand; None: there is none.

    Raises:
        DeepSpeedConfigError: Shapes do not fit, or a number cannot be used.
    """
    if student_logits.shape != teacher_logits.shape or response_mask.shape != student_logits.shape[:-1]:
        raise DeepSpeedConfigError(
            "generalized_jsd_loss: expected logits of one shape [..., vocabulary] and a mask [...], found "
            f"{list(student_logits.shape)}, {list(teacher_logits.shape)} and {list(response_mask.shape)}; pass those "
            "of the same tokens"
        )
    size = student_logits.shape[-1]
    if not 0 <= beta <= 1 or temperature <= 0 or not (teacher_top_k is None or 1 <= teacher_top_k <= size):
        raise DeepSpeedConfigError(
            f"generalized_jsd_loss(beta={beta}, temperature={temperature}, teacher_top_k={teacher_top_k}): expected "
            f"beta from 0 to 1, a temperature above 0 and a teacher_top_k from 1 to {size} or None; change them"
        )
    with torch.no_grad():
        teacher_logits = teacher_logits.float() / temperature
        if teacher_top_k is not None:
            teacher_logits, best = teacher_logits.topk(teacher_top_k, -1)
        teacher = teacher_logits.log_softmax(-1)
    student_logits = student_logits.float() / temperature
    if teacher_top_k is not None:
        student_logits = student_logits.gather(-1, best)
    student = student_logits.log_softmax(-1)
    if beta == 0:
        summands = _summands(teacher, student)
    elif beta == 1:
        summands = _summands(student, teacher)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        summands = beta * _summands(teacher, mixture) + (1 - beta) * _summands(student, mixture)
    if pointwise_clip is not None:
        summands = summands.clamp(max=pointwise_clip)
    counts = response_mask.to(summands.device) != 0
    loss_sum = summands.sum(-1).masked_fill(~counts, 0.0).sum()
    count = counts.sum()
    return DistillationLoss(loss_sum / count.clamp(min=1), loss_sum, count)


def _summands(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns ``p (log p - log q)``, whose sum over the last dimension is KL(p, q); 0 where p is 0."""
    impossible = log_p == -torch.inf
    difference = log_p.masked_fill(impossible, 0.0) - log_q.masked_fill(impossible, 0.0)
    return log_p.exp() * difference
