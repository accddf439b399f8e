"""Which dtype each tensor has."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config import parse
from deepspeed.precision.policy import PrecisionPolicy


def policy_of(**sections):
    parsed = parse({"train_micro_batch_size_per_gpu": 1, **sections}, dp_world_size=1)
    return PrecisionPolicy.from_config(parsed.root, get_accelerator(), nn.Linear(1, 1))


def test_modules_kept_in_fp32_are_found_by_whole_parts_of_names():
    policy = policy_of(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["norm"]})
    tensor = torch.zeros(1)
    assert policy.dtype_for("blocks.0.norm.weight", tensor) == torch.float32
    assert policy.dtype_for("blocks.0.normal.weight", tensor) == torch.bfloat16
    assert policy.dtype_for("norm.index", tensor.long()) == torch.int64


def test_only_floating_buffers_are_cast():
    model = nn.BatchNorm1d(3)
    policy_of(bf16={"enabled": True}).cast_buffers(model, torch.device("cpu"))
    assert model.running_mean.dtype == torch.bfloat16
    assert model.num_batches_tracked.dtype == torch.int64
