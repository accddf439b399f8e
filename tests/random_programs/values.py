"""Initial values of parameters and contents of batches; both depend on names and numbers only."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.random_programs.program import Model

IGNORED = -100
ROWS = 2


def generator(*key: Any) -> torch.Generator:
    """Returns a random generator whose seed depends on ``key`` only."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


@torch.no_grad()
def fill(parameters: Mapping[str, nn.Parameter], salt: int = 0) -> None:
    """Gives every parameter values that depend on its name, its shape and ``salt``."""
    for name, parameter in parameters.items():
        values = torch.randn(parameter.shape, generator=generator(name, salt))
        if parameter.dim() > 1:
            values *= 0.6 / parameter[0].numel() ** 0.5 if parameter.numel() else 1.0
        else:
            values = values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        parameter.copy_(values)


def batch_of(model: Model, phase: int, step: int, micro: int, data: int, extra: int = 0) -> dict[str, Any]:
    """Returns a micro-batch of a data rank: whole sequences.

    Returns:
        ``ids``, ``positions`` and ``labels`` (each token's next one) of ``[rows, tokens]``, ``mask`` or None, and
        ``branch``: whether this forward runs the model's optional layer.
    """
    given = model.given
    random = generator(model, phase, step, micro, data, extra)
    tokens = given["tokens"]
    if given["ragged"]:
        tokens = max(3, tokens - (step + micro + 2 * data) % 4)
    ids = torch.randint(1, given["vocabulary"], (ROWS, tokens), generator=random)
    labels = torch.cat((ids[:, 1:], torch.full((ROWS, 1), IGNORED)), 1)
    labels = labels.masked_fill(torch.rand(ROWS, tokens, generator=random) < 0.2, IGNORED)
    labels[0, 0] = ids[0, 1]
    positions = torch.arange(tokens).expand(ROWS, -1).contiguous()
    mask = None
    if given["mask"] != "none":
        mask = torch.ones(ROWS, tokens, dtype=torch.int64)
        padded = 1 + int(torch.randint(tokens // 2, (), generator=random))
        hidden = slice(0, padded) if given["mask"] == "left" else slice(tokens - padded, tokens)
        mask[1, hidden] = 0
        labels = labels.masked_fill(mask == 0, IGNORED)
        labels[:, :-1][mask[:, 1:] == 0] = IGNORED
    branch = {"never": False, "always": True, "some": (step + micro + data) % 2 == 0, "steps": step % 2 == 0}
    return {
        "ids": ids, "positions": positions, "labels": labels, "mask": mask,
        "branch": branch[given.get("branch", "never")],
    }  # fmt: skip


def part_of(batch: dict[str, Any], place: int, size: int) -> dict[str, Any]:
    """Returns a sequence rank's tokens of a batch."""
    tokens = batch["ids"].shape[1]
    mine = slice(place * (tokens // size), (place + 1) * (tokens // size))
    return {name: value[:, mine] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
