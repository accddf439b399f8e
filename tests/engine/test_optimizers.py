"""Optimizers and schedulers of programs, and those that are refused."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

import deepspeed
from deepspeed import zero
from deepspeed.engine import initialize
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, NotYetSupportedError
from tests.engine.support import SHARDED, adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups, tower
from tests.zero.reading import full_masters, full_params, full_states

# The client's optimizer stays the client's: same object, same group dicts, schedulers and earlier state go on.


def _config(stage, **more):
    zero = {"stage": stage, **(SHARDED if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_objects_schedulers_and_rates(stage):
    """Parameters that no group holds are left alone."""
    model = tower()
    groups = [{"params": list(model.layers.parameters()), "note": "mine"}, {"params": list(model.last.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-5)
    dicts = list(optimizer.param_groups)
    before = StepLR(optimizer, step_size=1, gamma=0.5)
    engine, wrapped, _, schedule = initialize(
        model=model, optimizer=optimizer, lr_scheduler=before, config=_config(stage)
    )
    assert engine.basic_optimizer is optimizer is wrapped.optimizer
    assert all(a is b for a, b in zip(optimizer.param_groups, dicts, strict=True))
    assert dicts[0]["note"] == "mine" and wrapped.param_groups is optimizer.param_groups
    assert schedule is before is engine.lr_scheduler
    frozen = {name: value.clone() for name, value in full_params(engine).items() if name.startswith("first")}
    rates = []
    for step in range(3):
        rates.append(engine.get_lr())
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    assert rates == [[0.01, 0.01], [0.005, 0.005], [0.0025, 0.0025]]
    dicts[1]["lr"] = 0.0
    last = full_masters(engine)["last.weight"]
    engine.backward(engine(inputs(9, rank())))
    engine.step()
    assert torch.equal(full_masters(engine)["last.weight"], last), "a learning rate written to a group takes effect"
    assert_states_equal({k: v for k, v in full_params(engine).items() if k in frozen}, frozen)


@on_ranks(2)
def test_callables():
    for stage in (0, 3):
        model = tower()
        config = _config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
        engine, _, _, schedule = initialize(
            model=model, model_parameters=model.parameters(), lr_scheduler=lambda o: StepLR(o, 1, 0.1), config=config
        )
        assert isinstance(schedule, StepLR)
        engine.backward(engine(inputs(0)))
        engine.step()
        assert engine.get_lr() == [pytest.approx(0.001)]
        model = tower()
        engine, *_ = initialize(
            model=model, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), config=_config(stage)
        )
        assert isinstance(engine.basic_optimizer, torch.optim.SGD) and engine.get_lr() == [0.5]


@pytest.mark.parametrize("kind", ["Adagrad", "SGD", "AdamW"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_state_from_before_is_carried_over(ranks, stage, kind):
    """The model has scalar, empty and unused parameters, and one whose gradients began later (its step count lags)."""

    # Three steps in plain torch, then three under the engine: as six in plain torch.
    def optimizer_of(model):
        groups = param_groups(model)
        if kind == "Adagrad":
            return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.3, foreach=False)
        if kind == "SGD":
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-5)

    def plain_steps(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            for r in range(ranks):
                out = losses_of(model(make_batch(step, r, branch=step != 1)))
                (out.loss / ranks).backward()
            optimizer.step()

    expected, moved = awkward(), awkward()
    reference = optimizer_of(expected)
    plain_steps(expected, reference, range(6))
    optimizer = optimizer_of(moved)
    plain_steps(moved, optimizer, range(3))
    for parameter in moved.parameters():
        parameter.grad = None
    engine, *_ = initialize(model=moved, optimizer=optimizer, config=_config(stage))
    for step in range(3, 6):
        engine.backward(losses_of(engine(make_batch(step, rank(), branch=step != 1))).loss)
        engine.step()
    masters = full_masters(engine)
    wanted = {name: p.detach() for name, p in expected.named_parameters() if p.requires_grad}
    assert_states_equal(masters, wanted, rtol=2e-5, atol=2e-6)
    states = full_states(engine)
    for name, parameter in expected.named_parameters():
        for key, value in reference.state.get(parameter, {}).items():
            if key != "step" and parameter.numel():
                torch.testing.assert_close(states[name][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")


@on_ranks(2)
def test_model_parameters_in_every_form():
    """``model_parameters`` in every form that scripts use."""
    config = _config(2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    forms = {
        "none": lambda m: None,
        "list": lambda m: list(m.parameters()),
        "generator": lambda m: m.parameters(),
        "filter": lambda m: filter(lambda p: p.requires_grad, m.parameters()),
        "groups": lambda m: [{"params": m.parameters(), "lr": 0.1}],
        "generator of groups": lambda m: ({"params": [p]} for p in m.parameters()),
        "named": lambda m: m.named_parameters(),
    }
    results = {}
    for name, form in forms.items():
        model = tower()
        engine, *_ = initialize(model=model, model_parameters=form(model), config=config)
        engine.backward(engine(inputs(0, rank())))
        engine.step()
        results[name] = full_masters(engine)
    for name, result in results.items():
        assert_states_equal(result, results["list"]), name
    model = tower()
    engine, optimizer, *_ = initialize(
        model=model, model_parameters=[], config=_config(0, optimizer=config["optimizer"])
    )
    assert optimizer is None and torch.isfinite(engine(inputs(0)))


@on_ranks(2)
def test_parameters_outside_the_groups():
    """Parameters that require gradients but belong to no group stay as they are and keep no gradient memory."""
    for stage in range(4):
        model = tower()
        engine, *_ = initialize(
            model=model, optimizer=torch.optim.SGD(model.last.parameters(), lr=0.1), config=_config(stage)
        )
        before = {k: v for k, v in full_params(engine).items() if not k.startswith("last")}
        for step in range(2):
            engine.backward(engine(inputs(step, rank())))
            engine.step()
        after = {k: v for k, v in full_params(engine).items() if not k.startswith("last")}
        assert_states_equal(after, before)
        assert list(full_masters(engine)) == ["last.weight", "last.bias"]
        assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_groups_that_change_after_initialize_are_refused():
    """What is added to the groups later would never be trained: it was taken in silence."""
    for stage in range(4):
        model = tower()
        optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
        engine, wrapped, *_ = initialize(model=model, optimizer=optimizer, config=_config(stage))
        engine.backward(engine(inputs(0, rank())))
        engine.step()
        with pytest.raises(CallOrderError, match="add_param_group: deepspeed.initialize fixes which parameters"):
            wrapped.add_param_group({"params": list(model.first.parameters())})
        optimizer.add_param_group({"params": list(model.first.parameters())})
        before = full_params(engine)
        engine.backward(engine(inputs(1, rank())))
        with pytest.raises(CallOrderError, match="the 2 param groups of SGD list .* tensors, but this rank trains"):
            engine.step()
        assert_states_equal(full_params(engine), before)
        del optimizer.param_groups[1]
        engine.step()
        assert bool((full_params(engine)["last.bias"] != before["last.bias"]).all())
        engine.destroy()


def _lambda_schedule():
    """A schedule keeps its base rates although initialize replaced the parameters."""
    model = tower()
    optimizer = adamw(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, *_ = initialize(
        args=SimpleNamespace(), model=model, optimizer=optimizer, lr_scheduler=schedule, config=_config(3)
    )
    for step in range(4):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    assert engine.get_lr() == [pytest.approx(0.01 / 5)]
    assert schedule.get_last_lr() == engine.get_lr()


def _arguments_of_the_schedule():
    class Noting(StepLR):
        noted: list = []

        def step(self, *args, **kwargs):
            self.noted.append((args, kwargs))
            super().step()

    model = tower()
    optimizer = adamw(model)
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=Noting(optimizer, 1), config=_config(2))
    Noting.noted.clear()
    engine.backward(engine(inputs(0, rank())))
    engine.step(lr_kwargs={"epoch": 3})
    assert Noting.noted == [((), {"epoch": 3})]


def test_schedulers_keep_their_base_rates():
    run_ranks(_lambda_schedule, 2)
    run_ranks(_arguments_of_the_schedule, 1)


@on_ranks(1)
def test_accessors():
    engine = engine_of(tower(), 1)
    engine.optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25] and engine.optimizer.get_lr() == 0.25
    assert engine.get_mom() == [(0.9, 0.999)]


@on_ranks(1)
def test_step_hooks_are_called() -> None:
    calls: list[str] = []
    model = tower()
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda given, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda given, args, kwargs: calls.append("after"))
    engine = initialize(model=model, optimizer=optimizer, config=_config(1))[0]
    for step in range(2):
        engine.backward(engine(inputs(step)))
        engine.step()
    assert calls == ["before", "after"] * 2


# What cannot work is refused at initialize, with the reason and the remedy, and the model is left as it was.


class OwnStep(torch.optim.AdamW):
    """A subclass whose step is the user's: nobody knows what it does."""

    def step(self, closure=None):
        return super().step(closure)


class OwnClass(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])


def _lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def _adafactor(model):
    return torch.optim.Adafactor(model.parameters())


def _sparse(model):
    return torch.optim.SparseAdam(list(model.parameters()))


def _muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


def _own_step(model):
    return OwnStep(model.parameters())


def _own_class(model):
    return OwnClass(model.parameters())


def _refused(make, stage, **config):
    model = tower()
    try:
        engine_of(model, stage, optimizer=make, **config)
    except DeepSpeedConfigError as error:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, tower().get_parameter(name)), f"{name} was changed by a refused initialize"
            assert type(parameter) is torch.nn.Parameter
        return str(error)
    raise AssertionError("accepted")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_adafactor, r"Adafactor.*stage \d.*rows and columns.*stage 0"),
        (_lbfgs, r"LBFGS"),
        (_sparse, r"SparseAdam.*sparse"),
        pytest.param(
            _muon,
            r"Muon.*stage \d.*this package's own Muon",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
        ),
        (_own_step, r"OwnStep.*overrides the step of AdamW.*zero_allow_untested_optimizer"),
        (_own_class, r"OwnClass.*zero_allow_untested_optimizer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizers_that_need_shapes_or_are_unknown(make, reason, stage):
    for text in run_ranks(_refused, 2, make, stage):
        assert re.search(reason, text), text


@pytest.mark.parametrize("make", [_lbfgs, _sparse], ids=lambda make: make.__name__)
def test_optimizers_that_work_nowhere(make):
    run_ranks(_refused, 1, make, 0)


def _allowed(stage, make):
    """Consent, or whole tensors at stage 0: then it trains as in plain torch."""
    engine = engine_of(tower(), stage, optimizer=make, zero_allow_untested_optimizer=True)
    plain = tower()
    optimizer = make(plain)
    for step in range(3):
        engine.backward(engine(inputs(step)))
        engine.step()
        optimizer.zero_grad()
        plain(inputs(step)).backward()
        optimizer.step()
    for name, value in full_masters(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)


def test_unknown_optimizers_with_consent_and_at_stage_0():
    for stage in (0, 1, 2, 3):
        run_ranks(_allowed, 2, stage, _own_class)
    run_ranks(_allowed, 2, 3, _own_step)


@on_ranks(1)
def test_what_is_not_an_optimizer_of_this_model():
    model, other = tower(), tower()
    messages = []
    for optimizer in (adamw(other), object(), lambda params: "no optimizer"):
        with pytest.raises(DeepSpeedConfigError) as caught:
            initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
        messages.append(str(caught.value))
    foreign, no_optimizer, wrong_callable = messages
    assert "not a parameter of the model" in foreign
    assert "expected a torch.optim.Optimizer" in no_optimizer
    assert "callable returned str" in wrong_callable


def _without_optimizer(stage: int) -> str:
    engine: Any = initialize(model=tower(), config={"train_batch_size": 2, "zero_optimization": {"stage": stage}})[0]
    assert torch.isfinite(engine(inputs(0)))
    with pytest.raises(CallOrderError, match="no optimizer"):
        engine.backward(engine(inputs(0)))
    with pytest.raises(CallOrderError, match="no optimizer"):
        engine.step()
    return "served"


def test_no_optimizer_at_all():
    """Stages 0 and 3 serve a model for inference; 1 and 2 shard what does not exist."""
    for stage in (0, 3):
        assert run_ranks(_without_optimizer, 1, stage) == ["served"]
    for stage in (1, 2):
        with pytest.raises(AssertionError, match="shards optimizer states, but there is no optimizer"):
            run_ranks(_without_optimizer, 1, stage)


@on_ranks(1)
def test_classes_that_programs_check_optimizers_for() -> None:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    kinds = (BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer)
    for stage, precision, optimizer, expected in (
        (0, "bf16", "AdamW", BF16_Optimizer),
        (0, "fp16", "AdamW", FP16_Optimizer),
        (0, "fp16", "Lamb", FP16_UnfusedOptimizer),
        (1, "fp16", "AdamW", None),
    ):
        config = {
            "train_micro_batch_size_per_gpu": 1, precision: {"enabled": True}, "optimizer": {"type": optimizer},
            "zero_optimization": {"stage": stage},
        }  # fmt: skip
        engine = deepspeed.initialize(model=tower(), config=config)[0]
        found = [kind for kind in kinds if isinstance(engine.optimizer, kind)]
        assert found == ([] if expected is None else [expected]), (stage, precision, optimizer)
        engine.destroy()


@on_ranks(1)
def test_loaders_whose_position_no_checkpoint_has(folder: str) -> None:
    data = list(range(8))
    with logged(logging.WARNING) as texts:
        engine = engine_of(tower(), 1)
        evaluation = engine.deepspeed_io(data, route="eval")
        engine.global_steps = 2
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder, load_optimizer_states=False)
        assert texts == [] and len(evaluation) == 4
        loader = engine.deepspeed_io(data)
        assert "load_checkpoint at step 2: a loader of deepspeed_io made after it is not engine" in texts.pop()
        engine.load_checkpoint(folder, load_optimizer_states=False)
        assert "load_checkpoint at step 2: a loader that deepspeed_io made is not engine" in texts.pop()
        engine.training_dataloader = loader
        engine.load_checkpoint(folder, load_optimizer_states=False)
        engine.deepspeed_io(data)
        assert texts == []


@on_ranks(1)
def test_mistakes_in_the_loop_are_named():
    with logged(logging.WARNING) as texts:
        _make_mistakes(texts)


def _make_mistakes(texts: list[str]) -> None:
    engine = engine_of(tower(), 3, dataloader_drop_last=True)
    with pytest.raises(DeepSpeedConfigError, match="expected a folder's path, found NoneType"):
        engine.save_checkpoint(None)
    with pytest.raises(DeepSpeedConfigError, match=r"load_dir=None\): expected a folder's path, found NoneType"):
        engine.load_checkpoint(None)
    with pytest.raises(DeepSpeedConfigError, match=r"save_16bit_model\(save_dir=None\): expected a folder's path"):
        engine.save_16bit_model(None)
    with pytest.raises(DeepSpeedConfigError, match=r"client_state=...\): expected a dict, found int"):
        engine.save_checkpoint("never", client_state=3)
    loss = engine(inputs(0))
    with pytest.raises(CallOrderError, match="expected the loss as a tensor, found tuple"):
        engine.backward((loss, None))
    with pytest.raises(CallOrderError, match="the loss does not require a gradient"):
        engine.backward(loss.detach())
    engine.backward(loss)
    engine.step()
    assert texts == []
    before = {name: value.clone() for name, value in full_masters(engine).items()}
    engine.step()
    engine.step()
    assert [text.split(";")[0] for text in texts] == [
        "engine.step: no backward has run since the last update, so there are no gradients"
    ]
    assert all(torch.equal(value, before[name]) for name, value in full_masters(engine).items())
    assert len(engine.deepspeed_io([1, 2, 3, 4])) == 2
    assert len(texts) == 1
    assert len(engine.deepspeed_io([1])) == len(engine.deepspeed_io([])) == 0
    assert "has 1 sample(s) for 1 rank(s) with batches of 2, and dataloader_drop_last" in texts[1]
    assert texts[2].endswith("the dataset has 0 sample(s) for 1 rank(s) with batches of 2")
    assert len(texts) == 3


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(DeepSpeedConfigError, match="'0.weight', '0.bias' have no shape yet.*one batch"):
        initialize(model=torch.nn.Sequential(torch.nn.LazyLinear(3)), config={"train_batch_size": 1})


@on_ranks(1)
def test_zero_init_refuses_a_parameter_that_torch_has_cut():
    """One DTensor in the model, as parallelize_module leaves it behind."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    module = torch.nn.Linear(3, 3)
    whole = module.weight.detach()
    module.weight = torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]))
    with pytest.raises(NotYetSupportedError, match="is a DTensor"):
        zero.Init(module=module)
