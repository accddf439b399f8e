"""Files of Transformers that have experts one by one, read into a model that has them in one tensor."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepspeed
from deepspeed.errors import CheckpointError
from tests.inference.test_tensor_parallel import make, tokens

pytest.importorskip("transformers")


def test_experts_that_are_stored_one_by_one(tmp_path):
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
