"""Lightning Fabric: the user's own loop around an engine that Fabric makes and drives."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ecosystem.lightning.devices import run_on_devices
from tests.harness import assert_states_equal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

NAMES = [
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
]


def _fabric(strategy, **more):
    import lightning as L

    from tests.ecosystem.lightning.support import all_devices

    fabric = L.Fabric(**all_devices(), strategy=strategy, **more)
    fabric.launch()
    return fabric


def _network():
    from tests.ecosystem.lightning.support import Linear, layers

    return nn.Sequential(*layers(), Linear(331, 1))


def _batches(steps=6):
    dice = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(steps, 4, 5, generator=dice)
    return list(zip(x, x.sum(dim=2, keepdim=True).sin(), strict=True))


def _train(fabric, model, optimizer, batches, schedule=None):
    losses = []
    for x, y in fabric.to_device(batches):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        fabric.backward(loss)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def _average_and_clip(model):
    """What the engine does with gradients by default."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _reference():
    """The same loop on all batches at once, without any library."""
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for x, y in _batches():
        loss = (model(x) - y).square().mean()
        loss.backward()
        _average_and_clip(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _named_strategies(folder):
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    from deepspeed import DeepSpeedEngine
    from tests.ecosystem.lightning.support import full, run

    with run(folder):
        STRATEGY_REGISTRY["deepspeed_stage_3_offload_nvme"]["init_params"]["nvme_path"] = str(folder)
        losses, weights = _reference()
        for name in NAMES:
            fabric = _fabric(name)
            with fabric.init_module():
                model = _network()
            inner = model
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            model, optimizer, schedule = fabric.setup(model, optimizer, scheduler=schedule)
            assert [type(module) for module in model.modules()].count(DeepSpeedEngine) == 1
            assert _train(fabric, model, optimizer, _batches(), schedule) == pytest.approx(losses, rel=1e-4), name
            assert_states_equal(full(inner), weights, rtol=2e-4, atol=2e-5)
            with pytest.raises(NotImplementedError, match="gradient_clipping"):
                fabric.clip_gradients(model, optimizer, max_norm=1.0)


def _save_and_load(folder):
    from lightning.fabric.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import full, run

    with run(folder):
        for stage in (1, 2, 3):

            def make(stage=stage):
                fabric, inner = _fabric(DeepSpeedStrategy(stage=stage)), _network()
                optimizer = torch.optim.AdamW(inner.parameters(), lr=0.0003)
                return fabric, inner, *fabric.setup(inner, optimizer)

            fabric, inner, model, optimizer = make()
            _train(fabric, model, optimizer, _batches())
            place = folder / f"fabric-{stage}"
            fabric.save(place, {"model": model, "optimizer": optimizer, "steps": 6, "note": {"a": [1, 2]}})
            straight = _train(fabric, model, optimizer, _batches())

            other_fabric, other, model2, optimizer2 = make()
            state = {"model": model2, "optimizer": optimizer2, "steps": 0, "note": None}
            rest = other_fabric.load(place, state)
            assert state["steps"] == 6 and state["note"] == {"a": [1, 2]} and isinstance(rest, dict)
            assert _train(other_fabric, model2, optimizer2, _batches()) == straight
            assert_states_equal(full(other), full(inner))
            # A live engine goes back, too.
            fabric.load(place, {"model": model, "optimizer": optimizer})
            assert _train(fabric, model, optimizer, _batches()) == straight


def _accumulation(folder):
    """Fabric's loop accumulates by calling backward more than once before the optimizer."""
    from lightning.fabric.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import full, run

    with run(folder):
        reference, batches = _network(), _batches()
        plain = torch.optim.AdamW(reference.parameters(), lr=0.0003)
        for number, (x, y) in enumerate(batches):
            ((reference(x) - y).square().mean() / 3).backward()
            if number % 3 == 2:
                _average_and_clip(reference)
                plain.step()
                plain.zero_grad()
        expected = {name: value.detach() for name, value in reference.named_parameters()}
        for stage in (1, 2, 3):
            fabric = _fabric(DeepSpeedStrategy(stage=stage))
            inner = _network()
            model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=0.0003))
            for number, (x, y) in enumerate(fabric.to_device(batches)):
                fabric.backward((model(x) - y).square().mean() / 3)
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_states_equal(full(inner), expected, rtol=2e-4, atol=2e-5)


def _inference(folder):
    from lightning.fabric.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import run

    with run(folder):
        x = _batches()[0][0]
        expected = _network()(x)
        for stage in (0, 3):
            strategy = DeepSpeedStrategy(stage=3) if stage else DeepSpeedStrategy(zero_optimization=False)
            fabric = _fabric(strategy)
            model = fabric.setup(_network())
            model.eval()
            with torch.no_grad():
                assert torch.allclose(model(fabric.to_device(x)).cpu(), expected, atol=1e-5)


def _half_precision(folder):
    from lightning.fabric.strategies import DeepSpeedStrategy

    from tests.ecosystem.lightning.support import run

    with run(folder):
        for precision, dtype in {"16-mixed": torch.float16, "bf16-true": torch.bfloat16}.items():
            fabric = _fabric(DeepSpeedStrategy(stage=3, initial_scale_power=8), precision=precision)
            with fabric.init_module():
                inner = _network()
            model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=0.0001))
            losses = _train(fabric, model, optimizer, _batches(1) * 8)
            assert {parameter.dtype for parameter in inner.parameters()} == {dtype}
            mean = torch.tensor(losses)  # of one rank: what the other learns may cost this one
            dist.all_reduce(mean)
            assert mean[-1] < mean[0]


BODIES = [_named_strategies, _save_and_load, _accumulation, _inference, _half_precision]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_two_ranks(body, tmp_path):
    run_on_devices(body, 2, tmp_path, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_on_one_rank(body, tmp_path):
    run_on_devices(body, 1, tmp_path, timeout=100)
