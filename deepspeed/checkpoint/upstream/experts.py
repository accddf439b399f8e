"""Experts in checkpoints of the original package: a file each for weights, groups of their own in optimizer states.

Weights are named by an expert's number among all. Optimizer states of stages 1 and 2 name it as the rank does that has
it: rank *d* of those with equal places, place *x* of *ep* that share experts, calls its first one 0. Ranks that share
experts are neighbours, so those with the same ones are *ep* apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.upstream.files import load
from deepspeed.checkpoint.upstream.walks import Shapes
from deepspeed.errors import CheckpointError

_NUMBER = re.compile(r"(?<=deepspeed_experts\.)\d+(?=\.)")


def expert_weights(paths: Sequence[Path], *, trust: bool) -> dict[str, torch.Tensor]:
    """Returns the weights of all experts, by name.

    Args:
        paths: One file per expert.
        trust: Unpickle objects of the caller, which may run code.
    """
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found.update(load(path, trust=trust))
    return found


def sharing_ranks(group: Mapping[str, Any], ranks: int) -> int:
    """Returns how many ranks share the experts of an optimizer group; 1 for a group without experts.

    Args:
        group: Its hyperparameters.
        ranks: Data-parallel ranks.

    Raises:
        CheckpointError: Its name does not say.
    """
    if not group.get("moe"):
        return 1
    name = str(group.get("name"))
    found = re.search(r"ep_size_(\d+)", name)
    if found is None or ranks % int(found[1]):
        raise CheckpointError(
            f"the optimizer group {name!r} holds experts, and its name should say how many of the {ranks} ranks share "
            "them, as ep_size_<n>; the layout is not understood"
        )
    return int(found[1])


def numbered_among_all(shapes: Shapes, place: int) -> dict[str, tuple[int, ...]]:
    """Shapes under the names that the experts of a place have among all.

    Args:
        shapes: Under the names that every rank uses.
        place: Of the rank among those that share the experts.
    """
    numbers = [int(found[0]) for name in shapes if (found := _NUMBER.search(name))]
    local = max(numbers, default=-1) + 1
    return {
        _NUMBER.sub(lambda found: str(place * local + int(found[0])), name): tuple(shape)
        for name, shape in shapes.items()
    }
