"""Experts whose weights lie stacked in one tensor each, ``[E, out, in]`` or ``[E, in, out]``.

On the host every expert is a matrix product of its own: a loop over ``weight.unbind(0)``, whose backward builds each
gradient once (indexing ``weight[e]`` would build a gradient of full size per expert, 30 times slower at 64 experts).
On CUDA devices of compute capability 9 and newer the products of all experts are one ``grouped_mm``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

Rowwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExpertStack:
    """A product with a weight and maybe a bias per expert.

    Attributes:
        weight: ``[E, out, in]``, or ``[E, in, out]`` where ``is_transposed``.
        bias: ``[E, out]`` or None.
        is_transposed: Which of the two.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool

    @functools.cached_property
    def _weights(self) -> Sequence[torch.Tensor]:
        return self.weight.unbind(0)

    @functools.cached_property
    def _biases(self) -> Sequence[torch.Tensor | None]:
        return [None] * len(self.weight) if self.bias is None else list(self.bias.unbind(0))

    def of(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product of one expert with ``rows``: ``[R, in]`` to ``[R, out]``."""
        weight, bias = self._weights[expert], self._biases[expert]
        if not self.is_transposed:
            return F.linear(rows, weight, bias)
        return rows @ weight if bias is None else rows @ weight + bias

    def grouped(self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Returns the products of all experts at once.

        Args:
            rows: ``[n, in]`` sorted by expert.
            ends: ``[E]`` int32: where the rows of each expert end.
            experts: ``[n]``: the expert of each row, for biases.
        """
        weight = self.weight if self.is_transposed else self.weight.transpose(1, 2)
        product = F.grouped_mm(rows.to(weight.dtype), weight, offs=ends)
        return product if self.bias is None else product + self.bias[experts]


@dataclass(frozen=True)
class StackedExperts:
    """Experts of two products each.

    Attributes:
        up: The first product.
        between: From its result to the input of the second one: activation, and gate if there is one.
        down: The second product.
        after: What follows it; None: nothing.
    """

    up: ExpertStack
    between: Rowwise
    down: ExpertStack
    after: Rowwise | None = None

    def run_each(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what each expert makes of its rows ``[n, M]``; none without rows is run.

        Where none has rows the first one is, on nothing: a stack that other ranks' parts of are used has gradients of
        zero, not none, so that its weights decay and its moments continue as those of one whole stack.
        """
        results = []
        is_idle = not any(map(len, rows))
        for expert, own in enumerate(rows):
            if len(own) or (is_idle and expert == 0):
                result = self.down.of(expert, self.between(self.up.of(expert, own)))
                results.append(result if self.after is None else self.after(result))
            else:
                results.append(own)
        return results

    def run_grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns what the experts make of their rows.

        Args:
            rows: ``[n, M]``, sorted by expert.
            counts: ``[E]`` int64 on their device: how many rows each expert has.
        """
        if not len(rows):
            return self.run_each([rows])[0]
        ends = counts.cumsum(0).to(torch.int32)
        has_bias = self.up.bias is not None or self.down.bias is not None
        experts = None
        if has_bias:
            experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        result = self.down.grouped(self.between(self.up.grouped(rows, ends, experts)), ends, experts)
        return result if self.after is None else self.after(result)

    @property
    def uses_grouped(self) -> bool:
        """Returns whether :meth:`run_grouped` is the faster way, and fits."""
        return uses_grouped(self.up.weight, self.down.weight)


def uses_grouped(*weights: torch.Tensor) -> bool:
    """Returns whether ``grouped_mm`` fits and is faster: bf16, compute capability 9 and newer, rows of 16 bytes."""
    return all(
        weight.device.type == "cuda"
        and weight.dtype == torch.bfloat16
        and _capability(weight.device) >= (9, 0)
        and all(extent * weight.element_size() % 16 == 0 for extent in weight.shape[1:])
        for weight in weights
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
