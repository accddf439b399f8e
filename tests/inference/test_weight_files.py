"""Which files weights come from."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepspeed
from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.errors import CheckpointError
from deepspeed.inference.weight_files import _training_tensors

# Which of the stored values of a training checkpoint inference reads.


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


# Files of Transformers that have experts one by one, read into a model that has them in one tensor.


def test_experts_that_are_stored_one_by_one(tmp_path):
    pytest.importorskip("transformers")
    from tests.inference.test_tensor_parallel import make, tokens

    make("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    part = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    assert stored[part].shape == (72, 64)

    def read():
        return deepspeed.init_inference(make("mixtral", "meta"), dtype="fp32", checkpoint=str(tmp_path))

    assert torch.equal(tokens(read()), tokens(make("mixtral")))
    weight = stored.pop(part)
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=r"the files hold 32,256 of the 36,864 elements of"):
        read()
    save_file({**stored, part: weight[:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"as a part of .*gate_up_proj.*found shape \(71, 64\)"):
        read()
