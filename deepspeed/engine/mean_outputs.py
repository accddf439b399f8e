"""The mean of a pipeline's outputs over micro-batches and copies of the model, for ``eval_batch``."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.axes import SAMPLES
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport
from deepspeed.parallel.pipe.data import DataError
from deepspeed.parallel.pipe.values import map_tensors, tensors_of

_MEANS = "the mean of the outputs (eval_batch)"


def mean_outputs(job: Job, ranks: Transport, mesh: Mesh, outputs: list[Any] | None) -> Any:
    """Returns the mean of the outputs, tensor by tensor. Every rank of the job must call it.

    Args:
        outputs: By micro-batch, on ranks with the last chunk; None elsewhere.

    Returns:
        A value nested like an output, with fp32 tensors; None where ``outputs`` is None.

    Raises:
        DataError: Shapes differ between micro-batches or copies of the model; on every rank.
    """
    tensors = [tensors_of(output) for output in outputs or ()]
    shapes = [[tuple(tensor.shape) for tensor in each] for each in tensors]
    _check_shapes(gather_objects(ranks, shapes, label="the shapes of the outputs"), mesh)
    axis = job.axis(*SAMPLES) if mesh.size(*SAMPLES) > 1 else None
    if outputs is None:
        return None
    means = [torch.stack([tensor.float() for tensor in same]).mean(0) for same in zip(*tensors, strict=True)]
    if axis is not None:
        means = [axis.channel(mean.device).sum(mean, _MEANS).div_(axis.size) for mean in means]
    remaining = iter(means)
    return map_tensors(outputs[0], lambda _tensor: next(remaining))


def _check_shapes(by_rank: list[list[Any]], mesh: Mesh) -> None:
    for group in mesh.groups(*SAMPLES):
        found = [(rank, number, shapes) for rank in group for number, shapes in enumerate(by_rank[rank])]
        for rank, number, shapes in found[1:]:
            if shapes != found[0][2]:
                raise DataError(
                    "eval_batch(compute_loss=False, reduce_output='avg'): expected outputs of the same shapes from all "
                    f"micro-batches and copies of the model, found {_shown(found[0][2])} in micro-batch 0 of rank "
                    f"{found[0][0]} and {_shown(shapes)} in micro-batch {number} of rank {rank}. Pad the inputs to one "
                    "length, or pass reduce_output=None and combine the outputs yourself"
                )


def _shown(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no tensor"
