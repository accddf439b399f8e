"""The section ``weight_quantization`` of a training configuration: under ``zero.Init``, and for a model that exists."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization
from deepspeed.linear import QuantizedLinear, quantize_model
from tests.harness import on_ranks

ALL = {"quantized_initialization": {"num_bits": 8}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def config(**section):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "weight_quantization": section,
    }


def make():
    torch.manual_seed(0)
    return Net()


@on_ranks(1, 2)
def test_the_section_quantizes():
    """Built under ``zero.Init``, built plainly, quantized beforehand: one and the same model afterwards."""
    ids = torch.arange(12).view(2, 6)
    expected = make()
    quantize_model(expected, bits=8)
    with torch.no_grad():
        wanted = expected(ids)
    part = {"post_init_quant": {"blocks.1": {"num_bits": 4, "group_size": 32}}}
    partly = make()
    quantize_model(partly, bits=4, group_size=32, only=["blocks.1"])
    for section, reference in ((ALL, wanted), (part, partly(ids).detach())):
        ready = _init_group_wise_weight_quantization(make(), config(**section))
        with deepspeed.zero.Init(config_dict_or_path=config(**section)):
            sharded = make()
        for model in (sharded, make(), ready):
            engine = deepspeed.initialize(model=model, config=config(**section))[0]
            engine.eval()
            assert type(engine.module.blocks[1]) is QuantizedLinear
            assert type(engine.module.blocks[2]) is (QuantizedLinear if section is ALL else nn.Linear)
            assert engine.module.head.weight is engine.module.embed.weight
            with torch.no_grad():
                assert torch.equal(engine(ids), reference)
            if torch.distributed.get_world_size() > 1:
                assert all(p.numel() == 0 for p in engine.module.parameters())
            engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match="post_init_quant some of them; give one"):
        deepspeed.initialize(model=make(), config=config(**ALL, **part))
    with pytest.raises(DeepSpeedConfigError, match="group_dim=0: expected 1"):
        deepspeed.initialize(model=make(), config=config(quantized_initialization={"num_bits": 8, "group_dim": 0}))
