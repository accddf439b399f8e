"""``float8``: losses and weights have the bits of torchao's own layers, trained unsharded in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.pipe import PipelineModule
from tests.ecosystem.support import on_cpu_ranks
from tests.harness import run_ranks
from tests.harness.toy_models import causal_model
from tests.zero.reading import full_masters

# Not importorskip: that imports torchao in every process that collects tests.
pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class _Net(nn.Module):
    """Blocks with a layer of odd sides and a head that is left out by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 21, bias=False), nn.Linear(21, 32))
            for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


def _batches():
    return [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(6)]


def _is_converted(layer, name):
    return layer.in_features % 16 == layer.out_features % 16 == 0 and "lm_head" not in name


def _plain(recipe):
    """Losses, and fp32 weights after three updates of two micro-batches, by torchao and torch alone."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    masters, model = _Net(), _Net().bfloat16()
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    convert_to_float8_training(model, config=config, module_filter_fn=_is_converted)
    losses = []
    for number, x in enumerate(_batches()):
        loss = model(x).float().square().mean()
        losses.append(loss.item())
        (loss / 2).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad.float()
            parameter.grad = None
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                    parameter.copy_(master)
    return losses, {name: value.detach() for name, value in masters.named_parameters()}


def _config(stage, recipe="tensorwise", **more):
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **sharded, **more.pop("zero", {})},
        "float8": {"recipe": recipe, "emulate": True},
        **more,
    }


def _train(engine):
    losses = []
    for x in _batches():
        loss = engine(x).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def _bits(cells):
    for stage, recipe, compiled, more in cells:
        losses, weights = _plain(recipe)
        engine = deepspeed.initialize(model=_Net(), config=_config(stage, recipe, **more))[0]
        if compiled:
            engine.compile(backend="aot_eager")
        assert _train(engine) == losses, (stage, recipe, more)
        masters = full_masters(engine)
        assert all(torch.equal(masters[name], weights[name]) for name in weights), (stage, recipe, more)
        engine.destroy()


def test_bits_of_torchao():
    recomputed = {"activation_checkpointing": {"blocks": True}}
    offloaded = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    cells = [(stage, "tensorwise", False, {}) for stage in range(4)]
    cells += [(3, recipe, False, {}) for recipe in RECIPES[1:]]
    cells += [
        (2, "rowwise", False, recomputed),
        (3, "tensorwise", False, recomputed),
        (3, "tensorwise", False, offloaded),
    ]
    run_ranks(_bits, 2, cells)


def test_bits_of_torchao_compiled():
    run_ranks(_bits, 2, [(0, "tensorwise", True, {}), (3, "tensorwise", True, {})])


def _moves(folder):
    """A checkpoint of a run in float8 goes on without."""
    engine = deepspeed.initialize(model=_Net(), config=_config(3))[0]
    _train(engine)
    engine.save_checkpoint(folder)
    expected = full_masters(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        gathered = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    assert all(torch.equal(gathered[name], expected[name].bfloat16()) for name in expected)
    for name, value in engine.export_weights(dtype=torch.float32):
        assert torch.equal(value, expected[name].bfloat16().float())
    engine.destroy()
    other = deepspeed.initialize(model=_Net(), config={**_config(1), "float8": {"enabled": False}})[0]
    other.load_checkpoint(folder)
    found = full_masters(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert type(other.module.blocks[0][0]).forward is nn.Linear.forward
    other.destroy()


def test_checkpoints_move_between_float8_and_bf16(tmp_path):
    run_ranks(_moves, 2, str(tmp_path))


def _gathered_in_float8(cells):
    for compiled, more in cells:
        losses, weights = _plain("tensorwise")
        for gather in ("none", "float8"):
            config = {**_config(3, **more), "float8": {"gather": gather, "emulate": True}}
            engine = deepspeed.initialize(model=_Net(), config=config)[0]
            if compiled:
                engine.compile(backend="aot_eager")
            assert _train(engine) == losses, (gather, more)
            masters = full_masters(engine)
            assert all(torch.equal(masters[name], weights[name]) for name in weights), (gather, more)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                for name, parameter in engine.module.named_parameters():
                    assert torch.equal(parameter, weights[name].bfloat16())  # whoever reads gets what is not rounded
            if gather == "float8" and not compiled:
                _edits(engine)
            engine.destroy()


def _edits(engine):
    """Values written inside GatheredParameters get scales of their own; those of one rank alone are refused."""
    layer = engine.module.blocks[0][0]
    with deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0):
        layer.weight.data.mul_(100)
    with deepspeed.zero.GatheredParameters([layer.weight]):
        written = layer.weight.detach().clone()
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    engine(_batches()[0])
    handle.remove()
    scale = 448 / written.abs().max().double()
    rounded = (written.float() * scale.float()).to(torch.float8_e4m3fn).float() / scale.float()
    assert torch.equal(seen[0], rounded.bfloat16())


def test_bits_of_torchao_with_gathers_in_float8():
    recomputed = {"activation_checkpointing": {"blocks": True}}
    run_ranks(_gathered_in_float8, 2, [(False, {}), (True, {}), (False, recomputed)])


def _bytes():
    """One byte of two for each element of the products' weights, and one exchange of scales for an update."""
    counted = {}
    for gather in ("none", "float8"):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        traffic.reset()
        losses = _losses({**config, "float8": {"gather": gather, "emulate": True}})
        counted[gather] = traffic.requested["all_gather"].nbytes, losses.tolist()
    assert counted["none"][1] == counted["float8"][1]
    layers, others = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96), 2 * 64 * 96
    share = layers / (layers + others)
    assert 0.5 * share <= 1 - counted["float8"][0] / counted["none"][0] + 0.01


def test_bytes_of_gathers_in_float8():
    run_ranks(_bytes, 2)


def _refusals():
    for more in ({"recipe": "rowwise"}, {}):
        config = {**_config(3), "float8": {"gather": "float8", "emulate": True, **more}}
        if not more:
            config["bf16"] = {"enabled": False}
        with pytest.raises(NotYetSupportedError, match='set gather to "none"'):
            deepspeed.initialize(model=_Net(), config=config)
    with pytest.raises(DeepSpeedConfigError, match=r"found none in _Net but .*blocks.0.2"):
        deepspeed.initialize(
            model=_Net(), config=_config(1, float8={"skip": ["0.0", "1.0", "lm_head"], "emulate": True})
        )
    hooked = _Net()
    calls = []
    hooked.blocks[0][0].register_forward_hook(lambda *_: calls.append(1))
    engine = deepspeed.initialize(model=hooked, config=_config(0))[0]
    _train(engine)
    assert len(calls) == 6 and type(hooked.blocks[0][0]).__name__ == "Linear"  # the program's hooks and names stay
    engine.destroy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao.float8", None)
        with pytest.raises(DeepSpeedConfigError, match="pip install torchao"):
            deepspeed.initialize(model=_Net(), config=_config(1))


def test_refusals_and_hooks():
    run_ranks(_refusals, 1)


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.15,
}  # fmt: skip


def _losses(config, kind="Llama", **sizes):
    engine = deepspeed.initialize(
        model=causal_model(kind, **SIZES, **sizes),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            **config,
        },
    )[0]
    losses = []
    for step in range(4):
        ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(step // 2))
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return torch.tensor(losses, dtype=torch.float64)


def _on_shared_layers(cells):
    """In fp32, as the order of partial sums in bf16 decides which values float8 rounds up."""
    for recipe, section, model in cells:
        float8 = {"float8": {"recipe": recipe, "emulate": True}}
        plain, whole, shared = (_losses(config, **model) for config in ({}, float8, {**float8, **section}))
        steps = 2 if section.get("expert_parallel") else 4  # then other roundings choose other experts
        change, difference = ((one - whole)[:steps].abs().mean() for one in (plain, shared))
        assert difference <= 0.3 * change and change > 1e-3, (recipe, section)


def test_shared_layers_have_the_scales_of_whole_ones():
    cut = {"tensor_parallel": {"autotp_size": 2}}
    cells = [(recipe, cut, {}) for recipe in RECIPES]
    cells += [
        ("tensorwise", {"tensor_parallel": {"autotp_size": 2, "sequence_parallel_norms": True}}, {}),
        (
            "tensorwise",
            {"expert_parallel": {"enabled": True, "autoep_size": 2}},
            {"kind": "Mixtral", "num_local_experts": 4},
        ),
    ]
    run_ranks(_on_shared_layers, 2, cells)


class _Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class _Head(nn.Module):
    def __init__(self, lm_head):
        super().__init__()
        self.lm_head = lm_head

    def forward(self, x):
        return self.lm_head(x)


def _as_pipeline():
    whole, expected = _plain("tensorwise")
    net = _Net()
    layers = [*(_Residual(*block) for block in net.blocks), _Head(net.lm_head)]
    model = PipelineModule(
        layers, num_stages=2, partition_method="uniform", loss_fn=lambda y, _: y.float().square().mean()
    )
    engine = deepspeed.initialize(model=model, config=_config(1))[0]
    batches = iter([(x, torch.zeros(1)) for x in _batches()])
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(whole[::2], whole[1::2], strict=True)], rel=1e-6)
    own, values = [*full_masters(engine).values()], [*expected.values()]
    part = values[: len(own)] if engine.is_first_stage() else values[-len(own) :]
    assert 0 < len(own) < len(values) and all(torch.equal(a, b) for a, b in zip(own, part, strict=True))
    engine.destroy()


def test_bits_of_torchao_in_a_pipeline():
    run_ranks(_as_pipeline, 2)


@on_cpu_ranks
def _by_accelerate():
    """``mixed_precision="fp8"`` with torchao: Accelerate converts the model, and it trains with torchao's bits."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    def converted(layer, name):
        return isinstance(layer, nn.Linear) and _is_converted(layer, name)

    losses, weights = _plain("tensorwise")
    recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True), module_filter_func=converted)
    plugin = DeepSpeedPlugin(hf_ds_config={**_config(3), "float8": {"enabled": False}})
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], deepspeed_plugin=plugin, gradient_accumulation_steps=2
    )
    net = _Net()
    engine = accelerator.prepare(net)
    assert type(net.blocks[0][0]).forward is not nn.Linear.forward
    found = []
    for x in _batches():
        with accelerator.accumulate(engine):
            loss = engine(x).float().square().mean()
            found.append(loss.item())
            accelerator.backward(loss)
    assert found == losses
    masters = full_masters(engine)
    assert all(torch.equal(masters[name], weights[name]) for name in weights)
    engine.destroy()


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_bits_of_torchao_through_accelerate():
    run_ranks(_by_accelerate, 2)
