"""Frozen bases with adapters: what is computed, what trains, and bases that ranks share at every ZeRO stage."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import deepspeed
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    init_lora,
)
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import causal_model

EIGHT = QuantizationConfig(q_bits=8)


def test_what_is_made_for_which_configurations():
    assert type(OptimizedLinear(6, 5)) is nn.Linear
    quantized = OptimizedLinear(6, 5, bias=True, quantization_config=EIGHT)
    assert type(quantized) is QuantizedLinear and quantized.bias.dtype == torch.bfloat16
    layer = OptimizedLinear(6, 5, bias=True, lora_config=LoRAConfig(lora_r=3, lora_alpha=6), dtype=torch.float32)
    named = dict(layer.named_parameters())
    assert set(named) == {"weight", "bias", "lora_weight_1.weight", "lora_weight_2.weight"}
    assert {name for name, p in named.items() if p.requires_grad} == {"lora_weight_1.weight", "lora_weight_2.weight"}
    assert named["weight"].ds_optim_param and layer.lora_scaling_factor == 2
    x = torch.randn(4, 6)
    assert torch.equal(layer(x), linear(x, layer.weight) + layer.bias)  # B is zero
    with torch.no_grad():
        layer.lora_weight_2.weight.normal_()
    merged = layer.full_weight() + 2 * layer.lora_weight_2.weight @ layer.lora_weight_1.weight
    torch.testing.assert_close(layer(x), linear(x, merged, layer.bias))


def test_a_quantized_base_takes_the_weights_of_a_plain_layer():
    torch.manual_seed(0)
    plain = nn.Linear(32, 8, bias=False)
    layer = OptimizedLinear(32, 8, False, LoRAConfig(lora_r=2), EIGHT, dtype=torch.float32)
    layer.load_state_dict(plain.state_dict(), strict=False)
    assert (layer.full_weight() - plain.weight).norm() < 0.01 * plain.weight.norm()
    again = OptimizedLinear(32, 8, False, LoRAConfig(lora_r=2), EIGHT, dtype=torch.float32)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(again(x), layer(x))


def test_adapters_can_come_later_and_bad_input_raises():
    layer = OptimizedLinear(4, 4, lora_config=LoRAConfig(lora_r=2, delay_lora_init=True), dtype=torch.float32)
    with pytest.raises(CallOrderError, match="call init_lora"):
        layer(torch.ones(1, 4))
    init_lora(nn.Sequential(layer))
    assert layer(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(CallOrderError, match="exist already"):
        layer.init_lora()
    with pytest.raises(DeepSpeedConfigError, match="offload_ratio=1.5"):
        LoRAConfig(offload=True, offload_ratio=1.5)
    with pytest.raises(DeepSpeedConfigError, match="lora_r=0"):
        LoRAConfig(lora_r=0)


def test_later_adapters_are_where_the_layer_was_moved_to():
    layer = OptimizedLinear(4, 4, lora_config=LoRAConfig(lora_r=2, delay_lora_init=True)).double()
    init_lora(layer)
    assert layer(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64
    with torch.device("meta"):
        layer = OptimizedLinear(4, 4, lora_config=LoRAConfig(lora_r=2, delay_lora_init=True), dtype=torch.float32)
    init_lora(layer.to_empty(device="cpu"))
    assert layer(torch.ones(1, 4)).device.type == "cpu"


def test_a_layer_with_two_names_is_replaced_under_both():
    with Init(lora_config=LoRAConfig(lora_r=2, target_mods=["first"])):
        model = nn.Module()
        model.first = model.second = nn.Linear(4, 4)
    assert isinstance(model.first, LoRAOptimizedLinear) and model.second is model.first


def test_models_that_are_built_inside_init():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = causal_model(vocab_size=50, **sizes)
    torch.manual_seed(0)
    before = nn.Module.__init__  # torch.compile leaves a wrapper of its own there
    with Init(lora_config=LoRAConfig(lora_r=4, target_mods=["q_proj", "down_proj"]), quant_config=EIGHT):
        model = transformers.AutoModelForCausalLM.from_config(plain.config)
    assert nn.Module.__init__ is before
    block = model.model.layers[1]
    assert type(block.self_attn.q_proj.base) is QuantizedLinear and type(block.self_attn.k_proj) is nn.Linear
    trained = {
        name.rpartition(".lora")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad
    }
    assert trained == {"q_proj", "down_proj"}
    ids = torch.arange(12).view(2, 6)
    assert (model(ids).logits - plain(ids).logits).norm() < 0.05 * plain(ids).logits.norm()
    with Init(quant_config=EIGHT):
        assert type(nn.Sequential(nn.Linear(4, 4))[0]) is nn.Linear
        kept = nn.Sequential(nn.Linear(4, 4))
    assert type(kept[0]) is QuantizedLinear


class Net(nn.Module):
    def __init__(self, sharing, quantized, delayed=False):
        super().__init__()
        torch.manual_seed(0)
        lora = LoRAConfig(lora_r=3, base_weight_sharding=sharing, delay_lora_init=delayed)
        quant = EIGHT if quantized else None
        self.blocks = nn.ModuleList(OptimizedLinear(17, 17, True, lora, quant, dtype=torch.float32) for _ in range(3))
        self.head = nn.Linear(17, 5)
        with torch.no_grad():
            for block in self.blocks:
                block.lora_weight_2.weight.normal_()

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def batch(step, rank):
    return torch.randn(4, 17, generator=torch.Generator().manual_seed(10 * step + rank))


def plainly(quantized, ranks):
    """Plain torch on one rank: losses, and the parameters that train afterwards."""
    model = Net(1, quantized)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4, weight_decay=0.1
    )
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(model(batch(step, rank)).square().mean() for rank in range(ranks)) / ranks
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def shared(cases, folder):
    for stage, sharing, quantized in cases:
        expected, state = plainly(quantized, 2)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        model = Net(sharing, quantized)
        base = model.blocks[0].base.codes if quantized else model.blocks[0].weight
        whole = base.detach().clone()
        engine = deepspeed.initialize(model=model, config=config)[0]
        rank = engine.global_rank
        for step in range(3):
            loss = engine(batch(step, rank)).square().mean()
            engine.backward(loss)
            engine.step()
            total = engine_mean(loss)
            assert total == pytest.approx(expected[step], rel=1e-4), (stage, sharing, quantized, step)
        assert (base.numel() == 0) == (sharing > 1 or stage == 3)
        found = dict(engine.iter_full("fp32"))
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        engine.save_checkpoint(folder, tag=f"{stage}{sharing}{quantized}")
        other = deepspeed.initialize(model=Net(sharing, quantized), config=config)[0]
        other.load_checkpoint(folder, tag=f"{stage}{sharing}{quantized}")
        assert_states_equal(dict(other.iter_full("fp32")), found)
        with deepspeed.zero.GatheredParameters([base]):
            assert torch.equal(base.detach(), whole)
        one, two = engine(batch(7, rank)), other(batch(7, rank))
        assert torch.equal(one, two)
        engine.destroy()
        other.destroy()


def engine_mean(loss):
    import torch.distributed as dist

    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def refused():
    with pytest.raises(DeepSpeedConfigError, match="base_weight_sharding=3.* use 2, or 1"):
        deepspeed.initialize(
            model=Net(3, False),
            config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}},
        )


@on_ranks(2)
def test_bases_that_ranks_share(folder):
    shared([(0, 2, False), (1, 2, True), (3, 1, True)], folder)
    refused()


@pytest.mark.slow
def test_bases_at_every_stage(tmp_path):
    cases = [(stage, sharing, few) for stage in range(4) for sharing in (1, 2) for few in (False, True)]
    run_ranks(shared, 2, cases, str(tmp_path), timeout=300)
