"""Replaces the experts that a router chooses by ``topk``, whatever the model's router computes before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TopK = Callable[[torch.Tensor], Any]
"""``torch.topk`` with all arguments but the scores."""


class ExpertChoice(TorchFunctionMode):
    """Lets :meth:`choose` replace what ``topk`` chooses; its values are those of the scores, with their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._masked: tuple[Any, Any] = (None, None)  # scores without some groups of experts, and whole ones

    def choose(self, scores: torch.Tensor, topk: TopK) -> torch.Tensor | None:
        """Returns the chosen experts ``[..., k]`` by scores ``[..., E]``; None where no expert is chosen."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0]
            indices = self.choose(scores, lambda other: func(other, *args[1:], **kwargs))
            if indices is not None:
                masked, whole = self._masked  # an expert outside of the groups that a router chose has its score, too
                values = (whole if scores is masked else scores).gather(-1, indices)
                return torch.return_types.topk((values, indices))
        result = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill):
            self._masked = (result, args[0])
        return result
