"""Weights for servers: on all ranks, in eight bits with scales, under other names, adapters alone."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.weight_formats import float8_blocks, int8_rows
from deepspeed.errors import DeepSpeedConfigError
from tests.checkpoint.test_export_weights import AXES, SIZES
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model


@pytest.mark.parametrize("shape", [(128, 256), (130, 257), (3, 200, 5)])
def test_float8_blocks(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[..., :128, :128] = 0  # a block without values
    codes, scales = float8_blocks(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    grown = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    torch.testing.assert_close(codes.float() * grown, weight, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    last = weight[..., -(shape[-2] % 128 or 128) :, -(shape[-1] % 128 or 128) :]
    torch.testing.assert_close(scales[..., -1, -1], last.abs().amax((-2, -1)) / 448)


def test_int8_rows():
    weight = torch.randn(2, 7, 33)
    weight[0, 3] = 0
    codes, scales = int8_rows(weight)
    assert codes.dtype == torch.int8 and scales.shape == (2, 7, 1) and int(codes.abs().max()) == 127
    assert float((codes * scales - weight).abs().max()) <= float(scales.max()) * 0.5001


def _print(weights):
    """Names, dtypes and a hash of all bytes, in order."""
    found = []
    for name, value in weights:
        data = value.cpu().reshape(-1).view(torch.uint8).numpy()
        found.append((name, str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest()))
    return found


@needs_transformers
@on_ranks(2)
def test_all_ranks_get_what_rank_0_gets():
    for more in AXES:
        model = causal_model("Mixtral", seed=1, **SIZES)
        model.register_buffer("seen", torch.full((3,), float(dist.get_rank())))  # another value on each rank
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
        engine = deepspeed.initialize(model=model, config=config)[0]
        for how in (
            {},
            {"dtype": torch.bfloat16, "names": lambda name: None if "norm" in name else f"m.{name}"},
            {"dtype": "float8_block128"},
            {"dtype": "int8", "names": lambda name: name.replace("model.", "")},
        ):
            first = _print(engine.export_weights(**how))
            everywhere = _print(engine.export_weights(ranks="all", **how))
            gathered = [None, None]
            dist.all_gather_object(gathered, everywhere)
            assert gathered[0] == gathered[1] and first == (everywhere if dist.get_rank() == 0 else [])
            infos = engine.weight_metadata(**how)
            assert [(info.name, str(info.dtype), info.shape) for info in infos] == [entry[:3] for entry in everywhere]
            values = dict(engine.export_weights(ranks="all", **how))
            assert [info.nbytes for info in infos] == [value.nbytes for value in values.values()]
        names = [info.name for info in engine.weight_metadata("float8_block128")]
        place = names.index("model.layers.0.self_attn.q_proj.weight")
        assert names[place + 1] == "model.layers.0.self_attn.q_proj.weight_scale_inv"
        assert "lm_head.weight_scale_inv" not in names
        assert any("experts" in name and "scale_inv" in name for name in names), names
        engine.destroy()


@needs_transformers
@on_ranks(2)
def test_adapters_alone_have_the_names_that_peft_saves():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        causal_model(**{**SIZES, "num_local_experts": 1}), peft.LoraConfig(target_modules=["q_proj"])
    )
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    saved = set(
        peft.get_peft_model_state_dict(peft.get_peft_model(causal_model(**SIZES), model.peft_config["default"]))
    )
    found = dict(engine.export_weights(ranks="all", adapters="only"))
    assert set(found) == saved and len(found) == 4
    engine.destroy()
    plain = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    for wrong in ({"adapters": "only"}, {"adapters": "all"}, {"ranks": 1}, {"dtype": "fp4"}, {"names": "hub"}):
        with pytest.raises(DeepSpeedConfigError, match="expected"):
            list(plain.export_weights(**wrong))
    plain.destroy()
