"""Of a cut parameter programs get the whole: accessors, the walk over everything, exports, checkpoints of any cut."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deepspeed
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from tests.ecosystem.support import needs_transformers
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.parallel.tensor.support import adamw, config, llama, loss_of

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight")
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def _engine(size: int, stage: int, seed: int = 0, **sections):
    model = llama()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
    return deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config(size, stage, **sections)
    )[0]


def _step(engine, step: int) -> None:
    engine.backward(loss_of(engine, step, engine.get_data_parallel_rank()))
    engine.step()


@pytest.mark.parametrize(
    ("ranks", "size", "stages"),
    [
        pytest.param(4, 2, (0, 2, 3), id="two ranks share each layer"),
        pytest.param(4, 4, (1,), id="and a key/value head"),
    ],
)
@on_ranks()
def test_accessors_deal_in_whole_parameters(size: int, stages: tuple[int, ...]) -> None:
    whole = llama()
    for data in range(dist.get_world_size() // size):
        (loss_of(whole, 0, data) / (dist.get_world_size() // size)).backward()
    expected = dict(whole.named_parameters())
    for stage in stages:
        engine = _engine(size, stage)
        parameters = dict(engine.module.named_parameters())
        engine.backward(loss_of(engine, 0, engine.get_data_parallel_rank()))
        for name in NAMES:
            assert torch.equal(safe_get_full_fp32_param(parameters[name]), expected[name].detach())
            torch.testing.assert_close(safe_get_full_grad(parameters[name]), expected[name].grad, rtol=1e-4, atol=1e-6)
        safe_set_full_grad(parameters[NAMES[0]], torch.zeros(67, 24))
        assert not safe_get_full_grad(parameters[NAMES[0]]).any()
        engine.step()
        for name in NAMES:
            value = torch.arange(expected[name].numel()).view(expected[name].shape).float()
            safe_set_full_fp32_param(parameters[name], value)
            assert torch.equal(safe_get_full_fp32_param(parameters[name]), value)
            safe_set_full_optimizer_state(parameters[name], value, "exp_avg")
            assert torch.equal(safe_get_full_optimizer_state(parameters[name], "exp_avg"), value)
            assert safe_get_full_optimizer_state(parameters[name], "step") == 1
        with pytest.raises(DeepSpeedConfigError, match=r"has the full shape \(67, 24\), the value has"):
            safe_set_full_fp32_param(parameters[NAMES[0]], parameters[NAMES[0]].detach())
        found = dict(engine.iter_full("fp32"))
        assert {name: tuple(value.shape) for name, value in found.items()} == {
            name: tuple(value.shape) for name, value in expected.items()
        }
        engine.destroy()


def _everything(engine) -> dict[str, torch.Tensor]:
    return {f"{kind}/{name}": value.clone() for kind in KINDS for name, value in engine.iter_full(kind)}


def _save(folder: str, size: int, stage: int):
    engine = _engine(size, stage, zero_optimization={"stage": stage, "stage3_gather_16bit_weights_on_model_save": True})
    for step in range(2):
        _step(engine, step)
    engine.save_checkpoint(folder, tag="one")
    engine.save_16bit_model(folder, "model.safetensors")
    return _everything(engine)


def _load(folder: str, size: int, stage: int):
    engine = _engine(size, stage, seed=5)
    _step(engine, 0)
    engine.load_checkpoint(folder, tag="one")
    assert engine.global_steps == 2
    found = _everything(engine)
    _step(engine, 7)
    return found


@needs_transformers
def test_any_cut_and_stage_loads_any_other(tmp_path):
    from transformers import LlamaForCausalLM

    folder = str(tmp_path)
    saved = run_ranks(_save, 4, folder, 4, 2)[0]
    for ranks, size, stage in ((4, 2, 3), (2, 2, 0), (1, 1, 1)):
        for found in run_ranks(_load, ranks, folder, size, stage):
            assert_states_equal(found, saved)
    whole = get_fp32_state_dict_from_zero_checkpoint(folder, "one")
    weights = load_file(f"{folder}/model.safetensors")
    for name in dict(llama().named_parameters()):
        assert_states_equal(whole[name], saved[f"fp32/{name}"])
        assert_states_equal(weights[name], saved[f"fp32/{name}"])
    llama().config.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), weights[name])


@on_ranks(3)
def test_parts_are_put_together_where_the_ranks_have_other_buckets() -> None:
    """Five heads over three ranks: a tile of one rank is small enough to stay gathered, that of another is not."""
    sizes = {"hidden_size": 20, "intermediate_size": 20, "num_attention_heads": 5, "num_key_value_heads": 1}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40, "reduce_bucket_size": 300}
    expected = dict(llama(**sizes).named_parameters())
    model = llama(**sizes)
    groups = [{"params": group} for group in (list(model.parameters())[::2], list(model.parameters())[1::2])]
    ranks = dist.get_world_size()
    settings = config(ranks, 3, zero_optimization=zero)
    engine = deepspeed.initialize(model=model, optimizer=adamw(groups), config=settings)[0]
    cuts = [None] * ranks
    dist.all_gather_object(cuts, [[tile.name for tile in bucket.layout.tiles] for bucket in engine._runtime.buckets])
    assert any(cut != cuts[0] for cut in cuts), "the ranks' buckets are alike, so this tests nothing"
    found = {name: value.clone() for name, value in engine.iter_full("fp32")}
    assert list(found) == list(expected)
    assert_states_equal(found, {name: parameter.detach() for name, parameter in expected.items()})
    engine.backward(loss_of(engine, 0, 0))
    whole = dict(engine.iter_full("grad"))
    safe_update_full_grad_vectorized(engine.module.parameters(), lambda gradient, _: gradient * 2)
    for name, gradient in engine.iter_full("grad"):
        torch.testing.assert_close(gradient, whole[name] * 2)
