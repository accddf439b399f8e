"""``float8``: losses and weights have the bits of torchao's own layers, trained unsharded in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from tests.harness import run_ranks
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

    def _block(self):
        return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 21, bias=False), nn.Linear(21, 32))

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
    expected, exported = (
        full_masters(engine),
        engine.get_fp32_state_dict() if hasattr(engine, "get_fp32_state_dict") else None,
    )
    del exported
    engine.destroy()
    other = deepspeed.initialize(model=_Net(), config={**_config(1), "float8": {"enabled": False}})[0]
    other.load_checkpoint(folder)
    found = full_masters(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert type(other.module.blocks[0][0]).forward is nn.Linear.forward
    other.destroy()


def test_checkpoints_move_between_float8_and_bf16(tmp_path):
    run_ranks(_moves, 2, str(tmp_path))


def _refusals():
    with pytest.raises(NotYetSupportedError, match='set it to "none"'):
        deepspeed.initialize(model=_Net(), config=_config(3, float8={"gather": "float8", "emulate": True}))
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
