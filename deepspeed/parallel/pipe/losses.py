"""What the last stage computed, told to every rank: losses and metrics, averaged over the copies of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.comm.mesh import PIPE, Mesh
from deepspeed.comm.objects import gather_objects
from deepspeed.comm.transport import Transport
from deepspeed.errors import PipelineError


class MicroBatchLosses:
    """Losses of one step on one rank, with what the loss function or the module gave beside them."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._metrics: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Any] | None) -> None:
        """Notes those of a micro-batch; they stay on the device."""
        self.losses.append(loss.detach().float())
        if metrics:
            self._count += 1
            for name, value in metrics.items():
                number = torch.as_tensor(value, device=loss.device).detach().float()
                self._metrics[name] = self._metrics[name] + number if name in self._metrics else number

    @property
    def mean(self) -> torch.Tensor:
        """Over the micro-batches."""
        return torch.stack(self.losses).mean() if self.losses else torch.tensor(0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Their means over the micro-batches."""
        return {name: float(value) / self._count for name, value in self._metrics.items()}


def split_loss(value: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """Loss and metrics of what a loss function returned.

    Raises:
        PipelineError: It is neither a tensor nor such a pair.
    """
    if isinstance(value, tuple) and len(value) == 2 and (value[1] is None or isinstance(value[1], Mapping)):
        return value
    if not isinstance(value, torch.Tensor):
        raise PipelineError(
            f"the loss function returned a {type(value).__name__}; expected a tensor of one element, or "
            "(loss, metrics) with a dict of metrics"
        )
    return value, None


def row_of(found: MicroBatchLosses | None, count: int) -> list[float]:
    """What a rank says to all others.

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
    """What all ranks of the job have said. Every rank must call it: metrics travel if there are any.

    Args:
        job: All ranks.
        mesh: How they are laid out.
        rank: This one.
        rows: Everybody's :func:`row_of`.
        found: As there.

    Returns:
        The losses of this rank's copy of the model by micro-batch, the mean over micro-batches and copies, and the
        means of the metrics.
    """
    tellers = [other for other, told in enumerate(rows.tolist()) if told[0]]
    metrics: dict[str, float] = {}
    if bool(rows[:, 1].any()):
        told = gather_objects(job, found.metrics if found is not None else None, label="the metrics of the step")
        given = [each for each in told if each]
        metrics = {name: sum(each[name] for each in given) / len(given) for name in given[0]}
    pipeline = mesh.group(rank, PIPE)
    mine = next(rows[other, 2:].tolist() for other in tellers if other in pipeline)
    return mine, float(rows[tellers, 2:].mean()), metrics


def share_losses(
    job: Transport, mesh: Mesh, rank: int, found: MicroBatchLosses | None, count: int
) -> tuple[list[float], float, dict[str, float]]:
    """Tells every rank of the job, in an exchange of its own. Every rank must call it.

    Arguments and result as of :func:`row_of` and :func:`read_rows`.
    """
    row = torch.tensor(row_of(found, count), dtype=torch.float64)
    rows = job.gather_small(row, channel="call", label="the losses of the step")
    return read_rows(job, mesh, rank, rows, found)
