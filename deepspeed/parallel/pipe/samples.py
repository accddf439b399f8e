"""Whether the ranks of one copy of a pipeline have the same samples: each says two numbers of its items.

The first stage computes from the inputs and the last one from the labels, which every rank loads for itself. So loaders
in another order (a shuffle by another seed, a sampler that counts the stages as data ranks) train on inputs with the
labels of others, and nothing else would show it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed.comm.job.mesh import OTHER_PARTS, PIPE, Mesh

_LOOKED_AT = 1024  # elements of a tensor; longer ones are looked at here and there


def fingerprints(items: Iterable[Any]) -> tuple[int, int]:
    """Returns a fingerprint of all inputs and one of all labels.

    Args:
        items: Pairs ``(inputs, labels)``; what is no pair says nothing.

    Returns:
        Numbers that are equal for equal tensors in host memory, and, all but surely, different for others; 0 where
        there is nothing to tell samples apart: no tensor, or only tensors of zeros or ones, as programs give in the
        place of what a stage does not need.
    """
    found = [0, 0]
    for item in items:
        if isinstance(item, (tuple, list)) and len(item) == 2:
            for which, part in enumerate(item):
                for tensor in _tensors(part):
                    found[which] = _crc(tensor, found[which])
    return found[0], found[1]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu" and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _crc(tensor: torch.Tensor, before: int) -> int:
    flat = tensor.detach().reshape(-1)
    seen = flat[:: max(1, flat.numel() // _LOOKED_AT)].contiguous()
    data, one = seen.view(torch.uint8).numpy().tobytes(), seen.element_size()
    if data == data[:one] * seen.numel() and seen[0].item() in (0, 1):
        return before
    return zlib.crc32(data, before)


def different_samples(rows: Sequence[tuple[int, int, bool]], mesh: Mesh) -> str | None:
    """Returns what is wrong with the samples of a step, in words that are the same on every rank; None if nothing is.

    Inputs may differ between stages where labels do not (noise that only the first stage's count), and the other way
    round; both together are other samples.

    Args:
        rows: Of each rank: the numbers of its inputs and labels, and whether it has items.
        mesh: How the ranks are laid out.
    """
    last = mesh.size(PIPE) - 1
    for group in mesh.groups(*OTHER_PARTS):
        here = [rank for rank in group if rows[rank][2]]
        for which, stage, what in ((0, 0, "inputs"), (1, last, "labels")):
            using = [rank for rank in here if mesh.position(rank, PIPE) == stage and rows[rank][which]]
            other = next((rank for rank in using if rows[rank][which] != rows[using[0]][which]), None)
            if other is not None:
                return f"the ranks {using[0]} and {other} share the layers of stage {stage}, but have different {what}"
        telling = [rank for rank in here if rows[rank][0] and rows[rank][1]]
        for rank in telling:
            if all(rows[rank][which] != rows[telling[0]][which] for which in (0, 1)):
                who = " and ".join(f"{one} (stage {mesh.position(one, PIPE)})" for one in (telling[0], rank))
                return (
                    f"the ranks {who} work on one copy of the model, but have different samples, so that outputs would "
                    "meet labels of others"
                )
    return None
