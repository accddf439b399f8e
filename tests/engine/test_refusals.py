"""What cannot work is refused at initialize, with the reason and the remedy, and the model is left as it was."""

import logging
import re
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import zero
from deepspeed.engine import initialize
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import logger
from tests.engine.support import adamw, engine_of, inputs
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


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


def _foreign():
    model, other = tower(), tower()
    messages = []
    for optimizer in (adamw(other), object(), lambda params: "no optimizer"):
        with pytest.raises(DeepSpeedConfigError) as caught:
            initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
        messages.append(str(caught.value))
    return messages


def test_what_is_not_an_optimizer_of_this_model():
    foreign, no_optimizer, wrong_callable = run_ranks(_foreign, 1)[0]
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
def test_loaders_whose_position_no_checkpoint_has(tmp_path) -> None:
    folder = str(tmp_path)
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    data = list(range(8))
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


def _mistakes() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
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
    logger.removeHandler(handler)
    return texts


def test_mistakes_in_the_loop_are_named():
    assert len(run_ranks(_mistakes, 1)[0]) == 3


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
