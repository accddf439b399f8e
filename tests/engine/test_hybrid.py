"""Generating between training steps: text of the weights as they are, training as without it."""

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.engine.hybrid import merged
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import causal_model

transformers = pytest.importorskip("transformers")


def make():
    model = causal_model(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def start(model, stage, **section):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if section:
        config["hybrid_engine"] = section
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, step):
    generator = torch.Generator().manual_seed(step * 10 + engine.global_rank)
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def prompt(rank):
    return torch.arange(5, 13).view(2, 4)[:, : 4 - rank]


@pytest.mark.parametrize(
    ("stage", "pins"),
    [
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        (2, True),
        (3, True),
        (3, False),
    ],
)
@on_ranks(2, timeout=300)
def test_text_and_training(stage, pins):
    """Losses with and without generation between the steps; text against the plain model's with the same weights."""
    plain = start(make(), stage)
    losses = [train(plain, step) for step in range(3)]
    engine = start(make(), stage, enabled=True, pin_parameters=pins)
    assert type(engine).__name__ == "DeepSpeedHybridEngine"
    rank, found = engine.global_rank, []
    for step in range(3):
        engine.eval()
        # Ranks stop at different lengths.
        texts = [
            engine.generate(prompt(rank), max_new_tokens=4 + rank, do_sample=False),
            engine.module.generate(input_ids=prompt(rank), max_new_tokens=3, do_sample=False),
        ]
        engine.train()
        whole = make().eval()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            whole.load_state_dict({name: p.detach().clone() for name, p in engine.module.named_parameters()}, False)
        assert torch.equal(texts[0], whole.generate(prompt(rank), max_new_tokens=4 + rank, do_sample=False))
        assert torch.equal(texts[1], whole.generate(prompt(rank), max_new_tokens=3, do_sample=False))
        found.append(train(engine, step))
    assert found == losses
    module = engine.module
    engine.destroy()
    assert "generate" not in vars(module)


def with_peft(stage):
    peft = pytest.importorskip("peft")
    seen = []
    model = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    engine = start(model, stage, enabled=True)
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        before = [p.detach().clone() for p in parameters]
    layer = engine.module.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer.register_forward_hook(lambda *_: seen.append(layer.merged))
    engine.eval()
    with mock.patch("deepspeed.zero.access.gathered.warn_once") as warned:
        text = engine.generate(input_ids=prompt(0), max_new_tokens=3, do_sample=False)
    assert seen and all(seen) and not layer.merged and not warned.called
    with deepspeed.zero.GatheredParameters(parameters):
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    engine.train()
    train(engine, 0)
    return text.tolist()


def test_adapters_are_merged_and_parted_bit_for_bit():
    texts = [run_ranks(with_peft, 2, stage, timeout=300) for stage in (1, 3)]
    assert texts[0] == texts[1]


def adapted() -> torch.nn.Linear:
    layer = torch.nn.Linear(6, 6)
    layer.lora_right_weight = torch.nn.Parameter(torch.randn(6, 2))
    layer.lora_left_weight = torch.nn.Parameter(torch.randn(2, 6))
    layer.lora_scaling, layer.fuse_lora = 0.3, False
    return layer


def test_adapters_on_a_shared_weight_are_parted_bit_for_bit():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([adapted(), adapted()])
    layers[1].weight = layers[0].weight
    before = layers[0].weight.detach().clone()
    with merged(layers) as count:
        assert count == 2 and not torch.equal(before, layers[0].weight)
    assert torch.equal(before, layers[0].weight)


def test_adapters_of_other_programs():
    torch.manual_seed(0)
    layer = adapted()
    before = layer.weight.detach().clone()
    with merged(layer) as count:
        assert count == 1 and layer.fuse_lora
        change = layer.weight - before
    torch.testing.assert_close(change, 0.3 * (layer.lora_right_weight @ layer.lora_left_weight).t())
    assert torch.equal(before, layer.weight) and not layer.fuse_lora


def test_a_bias_that_an_adapter_changes_is_restored_bit_for_bit():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False, lora_bias=True))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with merged(model) as count:
        assert count == 1
    assert [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])] == []


class Generates(torch.nn.Linear):
    def generate(self):
        return "of the class"


def own_method(stage):
    model = Generates(2, 2)
    model.generate = lambda: "of the object"
    engine = start(model, stage, enabled=True, pin_parameters=False)
    assert engine.generate() == model.generate() == "of the object"
    engine.destroy()
    assert model.generate() == "of the object"


def test_a_model_gets_a_generate_of_its_own_back():
    run_ranks(own_method, 1, 0)
    run_ranks(own_method, 2, 3)  # without synced_gpus, which it does not take


class Words:
    pad_token_id, eos_token_id = 0, 2


@on_ranks(2)
def test_rollouts():
    from deepspeed.runtime.rollout import HybridEngineRollout, RolloutRequest, SamplingConfig

    engine = start(make(), 3, enabled=True)
    rank = engine.global_rank
    engine.module.model.layers[0].training = False
    roll = HybridEngineRollout(engine, Words())
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])[:, rank:]
    mask = (ids != 0).long()
    found = roll.generate(RolloutRequest(ids, mask), SamplingConfig(6 + rank, temperature=0, n_samples_per_prompt=2))
    plain = make().eval()
    expected = plain.generate(ids, attention_mask=mask, max_new_tokens=6 + rank, do_sample=False)
    start_at = 4 - rank
    assert torch.equal(found.input_ids, expected.repeat_interleave(2, 0)) and found.response_start_idx == start_at
    assert torch.equal(found.attention_mask[:, :start_at], mask.repeat_interleave(2, 0))
    assert engine.training and [name for name, module in engine.module.named_modules() if not module.training] == [
        "model.layers.0"
    ]
    for row, seen in zip(found.input_ids[:, start_at:], found.attention_mask[:, start_at:], strict=True):
        ends = (row == 2).nonzero().flatten().tolist()
        assert seen.sum() == (ends[0] + 1 if ends else len(row))
    torch.manual_seed(rank)
    drawn = roll.generate(RolloutRequest(ids, mask), SamplingConfig(4, temperature=0.7, top_p=0.9, top_k=5))
    assert drawn.input_ids.shape[0] == 2 and roll.sync_weights(1) is None
    with pytest.raises(ValueError, match="padded on the left"):
        roll.generate(RolloutRequest(ids.flip(1), mask.flip(1)), SamplingConfig(4))
    roll.shutdown()
    with pytest.raises(CallOrderError, match="shutdown"):
        roll.generate(RolloutRequest(ids, mask), SamplingConfig(4))
    with pytest.raises(DeepSpeedConfigError, match="hybrid_engine.enabled"):
        HybridEngineRollout(start(make(), 0), Words())


@on_ranks(1)
def test_bad_input_raises():
    with pytest.raises(DeepSpeedConfigError, match="Linear has no method generate"):
        start(torch.nn.Linear(2, 2), 0, enabled=True)
    with pytest.raises(DeepSpeedConfigError, match="inference_tp_size: 2: layers are cut"):
        start(make(), 0, enabled=True, inference_tp_size=2)
