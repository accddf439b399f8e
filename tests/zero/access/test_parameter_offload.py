"""The optimizer of stage 3 and the object that engines without an optimizer return."""

import itertools

import pytest
import torch

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError, NotYetSupportedError
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero import DeepSpeedZeRoOffload, GatheredParameters, ZeroParamStatus, unwrap_model_for_generation
from deepspeed.zero.access import states
from tests.harness import on_ranks
from tests.zero.access.support import Model, batch, build, config, train

# engine.optimizer.parameter_offload, the optimizer of engines without one, and generation with a gathered model.


def evaluation(stage=3):
    settings = config(stage)
    del settings["optimizer"]
    torch.manual_seed(3)
    return deepspeed.initialize(model=Model(), config=settings)


# As libraries for generation reach in.


def _all_parameters(module):
    return itertools.chain(module.named_parameters(), module.ds_external_parameters())


def _remove_hooks(engine):
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for _, parameter in _all_parameters(offload.module):
        parameter.ds_active_sub_modules.clear()
    for hook in offload.forward_hooks:
        hook.remove()
    for hook in offload.backward_hooks:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def _add_hooks(engine):
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not offload.param_coordinator.is_invalid_trace():
        offload.param_coordinator._invalidate_trace()
    offload._register_deepspeed_module(offload.module)


@pytest.mark.parametrize("trained", [True, False])
@on_ranks(2)
def test_generation_with_everything_gathered_and_no_hooks(rank, trained):
    engine = build(3) if trained else evaluation()[0]
    if trained:
        train(engine, rank, 2)
    engine.eval()
    with torch.no_grad():
        wanted = engine(batch(rank)).item()
    for unwrap in (True, False):
        with counted() as traffic, torch.no_grad():
            if unwrap:
                with unwrap_model_for_generation(engine) as model:
                    gathered = traffic.requested["all_gather"].calls
                    assert not any(m._forward_pre_hooks for m in model.modules())
                    for _ in range(3):
                        assert model(batch(rank)).item() == wanted
            else:
                with GatheredParameters(engine.parameters()):
                    gathered = traffic.requested["all_gather"].calls
                    _remove_hooks(engine)
                    assert all(p.ds_status == ZeroParamStatus.AVAILABLE for p in engine.module.parameters())
                    for _ in range(3):
                        assert engine.module(batch(rank)).item() == wanted
                    _add_hooks(engine)
            assert traffic.requested["all_gather"].calls == gathered
        assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in engine.module.parameters() if p.ds_numel)
        with torch.no_grad():
            assert engine(batch(rank)).item() == wanted
    if trained:
        engine.train()
        train(engine, rank, 2, first=2)
        twin = build(3)
        train(twin, rank, 4)
        theirs = dict(twin.iter_full("fp32"))
        assert all(torch.equal(value, theirs[name]) for name, value in engine.iter_full("fp32"))


@on_ranks(2)
def test_an_engine_without_an_optimizer_returns_deepspeed_zero_offload(rank):
    engine, optimizer, loader, scheduler = evaluation()
    assert isinstance(optimizer, DeepSpeedZeRoOffload) and engine.optimizer is optimizer
    assert optimizer.module is engine.module and loader is None and scheduler is None
    assert not hasattr(optimizer, "overflow")
    torch.manual_seed(3)
    engine.eval()
    with torch.inference_mode():
        assert engine(batch(rank)).item() == Model()(batch(rank)).item()
    with pytest.raises(CallOrderError, match="no optimizer"):
        engine.step()
    with pytest.raises(CallOrderError, match="no optimizer"):
        engine.backward(engine(batch(rank)))
    optimizer.partition_all_parameters()
    assert all(p.shape == (0,) for p in engine.module.parameters() if p.ds_numel)
    assert engine.get_global_grad_norm() is None and engine.get_lr() == []
    engine.destroy()
    engine, optimizer, *_ = evaluation(0)
    assert optimizer is None and engine.optimizer is None
    trained = build(3)
    assert isinstance(trained.optimizer.parameter_offload, DeepSpeedZeRoOffload)
    assert getattr(build(2).optimizer, "parameter_offload", None) is None


@on_ranks(2)
def test_deepspeed_zero_offload_without_an_engine(rank):
    torch.manual_seed(3)
    model = Model()
    wanted = model(batch(rank)).item()
    settings = {"zero_optimization": {"stage": 3}}
    offload = DeepSpeedZeRoOffload(model, None, settings, param_persistence_threshold=0)
    assert all(p.shape == (0,) for p in model.parameters() if p.ds_numel)
    with torch.no_grad():
        assert model(batch(rank)).item() == wanted
        assert model(batch(rank)).item() == wanted
    offload.destroy()
    with pytest.raises(NotYetSupportedError, match="zenflow"):
        DeepSpeedZeRoOffload(Model(), None, settings, zenflow=True)


# The methods of the optimizer of stage 3 that read and write states of single parameters.


@on_ranks(2)
def test_methods_are_those_of_the_functions(rank):
    engine = build(3)
    optimizer, params = engine.optimizer, dict(engine.module.named_parameters())
    assert type(optimizer) is DeepSpeedZeroOptimizer_Stage3
    train(engine, rank, 1)
    weight, frozen = params["blocks.0.fall.weight"], params["frozen"]
    assert optimizer.get_full_hp_param(frozen) is None and optimizer.get_fp32_grad_for_param(weight) is None
    for key in (None, "exp_avg"):
        value = optimizer.get_full_hp_param(weight, key) + 0.5
        optimizer.set_full_hp_param(value, weight, key)
        assert torch.equal(optimizer.get_full_hp_param(weight, key), value)
        mine = optimizer.get_local_fp32_param(weight, key)
        optimizer.set_local_hp_param(mine * 2, weight, key)
        assert torch.equal(optimizer.get_full_hp_param(weight, key), value * 2)
    assert torch.equal(states.safe_get_full_fp32_param(weight), optimizer.get_full_hp_param(weight))
    engine.backward(engine(batch(rank, 1, torch.float32)))
    gradient = optimizer.get_fp32_grad_for_param(weight)
    optimizer.set_fp32_grad_for_param(gradient + 1, weight)
    optimizer.set_local_grad_for_param(optimizer.get_local_fp32_grad_for_param(weight) * 2, weight)
    assert torch.equal(states.safe_get_full_grad(weight), (gradient + 1) * 2)
