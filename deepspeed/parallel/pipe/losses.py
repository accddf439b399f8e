"""Losses and metrics of the last stage, sent to every rank and averaged over the copies of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.comm.job.mesh import PIPE, Mesh
from deepspeed.comm.transports.objects import gather_json
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import PipelineError


class MicroBatchLosses:
    """Losses of one step on one rank, with what the loss function or the module gave beside them."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._metrics: dict[str, tuple[torch.Tensor, int]] = {}  # sums, and how many micro-batches gave each

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Any] | None) -> None:
        """Notes those of a micro-batch; they stay on the device.

        Raises:
            PipelineError: A metric is no number.
        """
        self.losses.append(loss.detach().float().reshape(()))
        for name, value in (metrics or {}).items():
            number = _as_number(name, value, loss.device)
            total, count = self._metrics.get(name, (torch.zeros_like(number), 0))
            self._metrics[name] = total + number, count + 1

    @property
    def mean(self) -> torch.Tensor:
        """Over the micro-batches."""
        return torch.stack(self.losses).mean() if self.losses else torch.tensor(0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each over the micro-batches that gave it."""
        return {name: float(total) / count for name, (total, count) in self._metrics.items()}


def _as_number(name: str, value: Any, device: torch.device) -> torch.Tensor:
    try:
        number = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number.numel() != 1 or number.is_complex():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
        raise PipelineError(
            f"the metric {name!r}, given beside the loss, is {what}; expected a number or a tensor of one element, of "
            "which the mean over micro-batches is taken"
        )
    return number.detach().float().reshape(())


def split_loss(value: Any, *, has_loss_fn: bool) -> tuple[Any, Mapping[str, Any] | None]:
    """Returns the loss and the metrics of a micro-batch.

    Args:
        value: What the loss function returned; without one, what the last layer returned.
        has_loss_fn: Whether there is one.

    Raises:
        PipelineError: It is neither a tensor of one element nor ``(loss, metrics)`` with such a tensor.
    """
    loss, metrics = value, None
    if isinstance(value, tuple) and len(value) == 2 and (value[1] is None or isinstance(value[1], Mapping)):
        loss, metrics = value
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        if has_loss_fn:
            raise PipelineError(
                f"PipelineModule(loss_fn=...): expected a tensor of one element, or (loss, metrics) with a dict of "
                f"metrics; the function returned {found}. Reduce it in loss_fn, with mean() or sum()"
            )
        raise PipelineError(
            f"PipelineModule(loss_fn=None): the output of the last layer is the loss then, expected a tensor of one "
            f"element, found {found}. Pass PipelineModule(..., loss_fn=...), called as loss_fn(outputs, labels)"
        )
    return loss, metrics


def row_of(found: MicroBatchLosses | None, count: int) -> list[float]:
    """Returns the numbers that a rank sends to all others.

    Args:
        found: What a rank with the last chunk has; None elsewhere.
        count: Micro-batches.
    """
    if found is None:
        return [0.0] * (count + 2)
    values = torch.stack(found.losses).double().tolist() if found.losses else []
    return [1.0, float(bool(found.metrics)), *values, *[0.0] * (count - len(values))]


def read_rows(
    job: Transport, mesh: Mesh, rank: int, rows: torch.Tensor, found: MicroBatchLosses | None
) -> tuple[list[float], float, dict[str, float]]:
    """Reads the rows of all ranks of the job. Every rank must call it: metrics travel if there are any.

    Args:
        job: All ranks.
        mesh: How they are laid out.
        rank: This one.
        rows: :func:`row_of` of each rank: 2-D, fp64.
        found: As there.

    Returns:
        The losses of this rank's copy of the model by micro-batch, the mean over micro-batches and copies, and of each
        metric the mean over the copies that gave it.
    """
    senders = [other for other, row in enumerate(rows.tolist()) if row[0]]
    if not senders:  # the planner's one rank stands for all, and has another chunk
        return [0.0] * (rows.shape[1] - 2), 0.0, {}
    metrics: dict[str, float] = {}
    if bool(rows[:, 1].any()):
        mine_given = list(found.metrics.items()) if found is not None else []
        given = [dict(pairs) for pairs in gather_json(job, mine_given, label="the metrics of the step") if pairs]
        for name in dict.fromkeys(name for each in given for name in each):
            values = [each[name] for each in given if name in each]
            metrics[name] = sum(values) / len(values)
    pipeline = mesh.group(rank, PIPE)
    mine = next(rows[other, 2:].tolist() for other in senders if other in pipeline)
    return mine, float(rows[senders, 2:].mean()), metrics


def share_losses(
    job: Transport, mesh: Mesh, rank: int, found: MicroBatchLosses | None, count: int
) -> tuple[list[float], float, dict[str, float]]:
    """Sends the losses to every rank of the job, in an exchange of its own. Every rank must call it.

    Arguments and result as of :func:`row_of` and :func:`read_rows`.
    """
    row = torch.tensor(row_of(found, count), dtype=torch.float64)
    rows = job.gather_small(row, channel="call", label="the losses of the step")
    return read_rows(job, mesh, rank, rows, found)
