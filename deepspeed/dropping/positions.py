"""Keeping some positions of the sequences in everything that a layer is given.

Shapes: B samples, S positions, k of them kept, H heads, D features. ``kept`` is an int64 tensor [B, k], sorted along k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Positions:
    """Which positions of each sample a layer sees.

    Attributes:
        kept: [B, k], sorted.
        length: S.
        is_shared: All samples keep the same ones.
        sequence_first: Hidden states are [S, B, ...] instead of [B, S, ...].
    """

    kept: torch.Tensor
    length: int
    is_shared: bool
    sequence_first: bool

    @classmethod
    def draw(
        cls, batch: int, length: int, count: int, device: torch.device, *, is_shared: bool, sequence_first: bool
    ) -> Positions:
        """Draws ``count`` of ``length`` positions for each sample, without repetition, from torch's generator."""
        dice = torch.rand(1 if is_shared else batch, length, device=device)
        kept = dice.topk(count, dim=1).indices.sort(dim=1).values
        return cls(kept.expand(batch, count), length, is_shared, sequence_first)

    @property
    def axes(self) -> tuple[int, int]:
        """Axis of the samples and axis of the positions in hidden states."""
        return (1, 0) if self.sequence_first else (0, 1)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the kept positions of hidden states: ``[B, S, width]`` to ``[B, count, width]``.

        The first two axes are the other way round with ``sequence_first``.
        """
        return self._along(hidden, *self.axes)

    def put_back(self, hidden: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """Returns ``hidden`` with the kept positions replaced by ``answer``.

        Args:
            hidden: ``[B, S, width]``.
            answer: ``[B, count, width]``, any dtype.
        """
        samples, positions = self.axes
        index = self._index(hidden.dim(), samples, positions).expand_as(answer)
        return hidden.scatter(positions, index, answer.to(hidden.dtype))

    def of_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Rows and columns of a mask: [B or 1, S], [S, S], or with further axes before [..., S or 1, S].

        Raises:
            ValueError: The mask does not end in the positions of the hidden states.
        """
        if mask.dim() < 2 or mask.shape[-1] != self.length:
            raise ValueError(
                f"random-LTD: a mask of shape {tuple(mask.shape)} does not end in the {self.length} positions of the "
                "hidden states, so it cannot be cut to the tokens that are kept"
            )
        batch = len(self.kept)
        if mask.dim() == 2 and (mask.shape[0] in (1, batch)) and mask.shape[0] != self.length:
            return self._along(mask, 0, 1)
        if mask.dim() == 2:  # for all samples alike
            mask = mask[None]
        columns = self._along(mask, 0, mask.dim() - 1)
        return self._along(columns, 0, mask.dim() - 2) if mask.shape[-2] == self.length else columns

    def of_table(self, table: torch.Tensor) -> torch.Tensor:
        """Returns the kept positions of something else that belongs to positions (their numbers, angles).

        Args:
            table: Of any shape. Where no dimension is that of the positions it is returned unchanged.
        """
        shape, batch = table.shape, len(self.kept)
        if is_for_all_samples(table, self.length, batch, sequence_first=self.sequence_first):
            return table.index_select(0, self.kept[0])
        samples, positions = self.axes
        if len(shape) >= 2 and shape[positions] == self.length and shape[samples] in (1, batch):
            return self._along(table, samples, positions)
        if len(shape) == 4 and shape[2] == self.length and shape[0] in (1, batch):  # [B or 1, H or 1, S, D]
            return self._along(table, 0, 2)
        return table

    def _index(self, dims: int, samples: int, positions: int) -> torch.Tensor:
        shape = [1] * dims
        shape[samples], shape[positions] = self.kept.shape
        kept = self.kept.t() if samples > positions else self.kept
        return kept.reshape(shape)

    def _along(self, tensor: torch.Tensor, samples: int, positions: int) -> torch.Tensor:
        if self.is_shared:
            return tensor.index_select(positions, self.kept[0])
        shape = list(tensor.shape)
        shape[samples] = len(self.kept)
        whole = tensor.expand(shape)
        shape[positions] = self.kept.shape[1]
        return whole.gather(positions, self._index(len(shape), samples, positions).expand(shape))


def is_for_all_samples(table: torch.Tensor, length: int, batch: int, *, sequence_first: bool) -> bool:
    """Whether a table of positions has no axis of samples: [S] or [S, D]."""
    if table.dim() == 0 or table.dim() > 2 or table.shape[0] != length:
        return False
    if table.dim() == 1:
        return True
    # [S, S] of as many samples as positions is read as one row per sample.
    return not (table.shape[1] == length and batch == length) and not (sequence_first and table.shape[1] == batch)


def mapped(value: Any, change: Any) -> Any:
    """``change`` of every tensor in a value that may be a tuple or list."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(part, change) for part in value)
    return value
