"""Which of the stored values of a training checkpoint inference reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.inference.weight_files import _training_tensors


class _Source:
    """A checkpoint of one parameter, which notes the kinds of values that are read."""

    aliases = {"tied": "weight"}
    buffers: dict[str, Any] = {}

    def __init__(self, kinds: dict[str, torch.dtype]) -> None:
        self.parameters = {"weight": SimpleNamespace(kinds=kinds, shape=(3, 2))}
        self.kinds_read: list[str] = []

    def check(self, wanted: Any) -> None:
        pass

    def read(self, wanted: Any, out: torch.Tensor) -> None:
        self.kinds_read.append(wanted.kind)
        out.copy_(torch.arange(6)[wanted.start : wanted.stop])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({COMPUTE: torch.bfloat16, MASTER: torch.float32}, (MASTER, torch.float32)),
        ({COMPUTE: torch.bfloat16}, (COMPUTE, torch.bfloat16)),  # a frozen parameter has no master
    ],
)
def test_masters_are_read_where_there_are_any(kinds, expected):
    source: Any = _Source(kinds)
    stored = {one.tile.logical: one for one in _training_tensors(source)}
    assert list(stored) == ["weight", "tied"]
    values = stored["tied"].read((slice(1, 3), slice(0, 1)))
    assert values.tolist() == [[2], [4]] and (source.kinds_read, values.dtype) == ([expected[0]], expected[1])
