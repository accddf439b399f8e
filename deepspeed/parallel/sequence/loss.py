"""The loss of whole sequences from the losses of their parts on each rank.

The number of tokens that count (labels that are not ignored) differs between ranks, so the mean of the ranks' means is
wrong: sums and counts are added over the ranks and divided once.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job import backward_comm, groups
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.differentiable import reduce_from, sum_over
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.uncompiled import uncompiled

IGNORED = -100


@uncompiled
def mean_loss(
    loss: torch.Tensor,
    labels: torch.Tensor,
    group: Any = None,
    *,
    ignore_index: int = IGNORED,
    own_share: bool = False,
) -> torch.Tensor:
    """Returns the mean over all counted tokens of the sequences that the ranks of a group share.

    Every rank of the group must call it and run its backward. Its gradient equals that of the unsharded loss
    if ``sequence_parallel.loss`` is ``own_share``.

    Args:
        loss: This rank's mean over its counted tokens (0-dim; ignored, and may be NaN, if none counts), or one value
            per label.
        labels: Labels of this rank's tokens (``shift_labels``), of any shape; ``ignore_index`` does not count.
        group: Torch process group of the ranks that share a sequence; None: the job's.
        ignore_index: See ``labels``.
        own_share: Back-propagate only this rank's share (``sequence_parallel.loss: "own_share"``). Otherwise the
            gradients of all ranks are summed, as by a differentiable all-gather.

    Returns:
        0-dim, the same on all ranks of the group; 0 where no token counts.

    Raises:
        DeepSpeedConfigError: ``loss`` has neither of these shapes.
    """
    counted = labels.to(loss.device) != ignore_index
    if loss.dim() == 0:
        count = counted.sum()
        total = torch.where(count > 0, loss, torch.zeros_like(loss)) * count
    elif loss.numel() == labels.numel():
        total = torch.where(counted.flatten(), loss.flatten(), torch.zeros((), dtype=loss.dtype, device=loss.device))
        total, count = total.sum(), counted.sum()
    else:
        raise DeepSpeedConfigError(
            f"mean_loss: expected a 0-dim loss or one value for each of the {labels.numel()} labels, found a tensor of "
            f"shape {tuple(loss.shape)}"
        )
    group = groups._get_sequence_parallel_group() if group is None else group
    wide = torch.float32 if total.dtype in (torch.float16, torch.bfloat16) else total.dtype
    summed = sum_over_ranks(torch.stack((total.to(wide), count.to(wide))), group, own_share=own_share)
    return summed[0] / summed[1].detach().clamp(min=1)


@uncompiled
def sum_over_ranks(values: torch.Tensor, group: Any, *, own_share: bool = False) -> torch.Tensor:
    """Returns the sum of a tensor over the ranks of a group, for losses over whole sequences (DPO).

    Every rank of the group must call it, with equal shape and dtype, and run its backward unless ``own_share`` (see
    :func:`mean_loss`).
    """
    channel, label = axis_of(group, SEQUENCE).channel(values.device), "the sum of a loss (sequence parallel)"
    if own_share:
        return reduce_from(values, channel, label)
    if torch.is_grad_enabled() and values.requires_grad:
        backward_comm.note_anywhere()
    return sum_over(values, channel, label)
