"""A load matches by name, leaves alone what it cannot fill, and continues bitwise when parameters were unfrozen."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint import load
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError
from tests.checkpoint.training import Net, config, fragments, groups, joined
from tests.checkpoint.training import engine as saved_engine
from tests.checkpoint.training import train as train_steps
from tests.engine.support import SHARDED, engine_of, inputs
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import tower


def make(stage: int, device: str) -> DeepSpeedEngine:
    model = tower()
    model.first.requires_grad_(False)
    zero = {**SHARDED, "offload_optimizer": {"device": device}} if stage == 3 else {}
    return engine_of(model, stage, zero=zero, bf16={"enabled": True})


def train(engine: DeepSpeedEngine, *steps: int) -> list[torch.Tensor]:
    for step in steps:
        engine.backward(engine(inputs(step, dist.get_rank())))
        engine.step()
    return [master.flat.clone() for master in engine._runtime.masters]


@on_ranks(2)
def test_parameters_unfrozen_before_a_load(tmp_path: Path) -> None:
    for stage, device in ((0, "none"), (3, "none"), (3, "cpu")):
        engine = make(stage, device)
        train(engine, 0)
        engine.module.first.requires_grad_(True)
        train(engine, 1, 2)
        engine.save_checkpoint(tmp_path, tag=f"{stage}{device}")
        expected = train(engine, 3)
        engine.destroy()
        engine = make(stage, device)
        engine.module.first.requires_grad_(True)
        engine.load_checkpoint(tmp_path, tag=f"{stage}{device}")  # before any backward
        assert_states_equal(train(engine, 3), expected)
        engine.destroy()
        engine = make(stage, device)
        with mock.patch.object(load, "log_dist") as logged:
            engine.load_checkpoint(tmp_path, tag=f"{stage}{device}")
        assert "2 parameters have saved masters" in logged.call_args.args[0]
        engine.destroy()


@on_ranks(2)
def test_a_param_group_that_is_frozen_at_a_load_keeps_its_learning_rate(tmp_path: Path) -> None:
    """Loads into a model in which a whole param group is frozen; its learning rate is the saved one."""
    rates = {}
    for is_frozen in (False, True):
        model = tower()
        model.first.requires_grad_(not is_frozen)
        groups = [{"params": list(model.layers.parameters()), "lr": 0.1}, {"params": list(model.first.parameters())}]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        engine = engine_of(model, 1, optimizer=lambda _, made=optimizer: made)
        if is_frozen:
            engine.load_checkpoint(tmp_path)
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
            train(engine, 0)
            engine.save_checkpoint(tmp_path)
        rates[is_frozen] = [group["lr"] for group in engine.optimizer.param_groups]
        engine.destroy()
    assert rates[True] == rates[False] == [0.025, 0.05]


class Reordered(Net):
    """The same names in another order, and one frozen parameter more in front."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(reversed(list(self._modules.items())))
        parameters = dict(reversed(list(self._parameters.items())))
        self._modules.clear()
        self._parameters.clear()
        self._parameters["adapter"] = nn.Parameter(torch.full((6, 5), 7.0), requires_grad=False)
        self._parameters.update(parameters)
        self._modules.update(modules)


def save_and_load_reordered(folder: str, stage: int):
    first = saved_engine(stage)
    train_steps(first, range(3))
    first.save_checkpoint(folder)
    torch.manual_seed(8)
    model = Reordered()
    parameters = list(reversed(groups(model)))  # the groups change places too
    again = deepspeed.initialize(model=model, config=config(stage), model_parameters=parameters)[0]
    with pytest.raises(deepspeed.errors.CheckpointError, match="missing +adapter"):
        again.load_checkpoint(folder)
    again.load_checkpoint(folder, load_module_strict=False)
    rates = [(group["weight_decay"], group["lr"]) for group in again.basic_optimizer.param_groups]
    expected = [(group["weight_decay"], group["lr"]) for group in reversed(first.basic_optimizer.param_groups)]
    assert rates == expected
    return fragments(first), fragments(again)


@pytest.mark.parametrize("stage", [0, 3])
def test_matching_is_by_name(stage, tmp_path):
    results = run_ranks(save_and_load_reordered, 2, str(tmp_path), stage)
    expected, held = joined([rank[0] for rank in results]), joined([rank[1] for rank in results])
    assert held.pop("compute/adapter").tolist() == [7.0] * 30
    # The tied matrix is now first met as the head.
    for kind in ("compute", "master", "state.exp_avg", "state.exp_avg_sq", "state.step"):
        held[f"{kind}/embed.weight"] = held.pop(f"{kind}/head.weight")
    assert_states_equal(held, expected)


class Different(Net):
    """One parameter less, one more, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused
        self.extra = nn.Linear(2, 3, bias=False)
        self.blocks[1].fall = nn.Linear(24, 9)


def load_what_does_not_fit(folder: str):
    first = saved_engine(3)
    train_steps(first, range(2))
    first.save_checkpoint(folder)
    model = Different()
    again = deepspeed.initialize(model=model, config=config(3), model_parameters=groups(model))[0]
    before, messages = fragments(again), []
    for strict in (True, False):
        with pytest.raises(deepspeed.errors.CheckpointError) as raised:
            again.load_checkpoint(folder, load_module_strict=strict)
        messages.append(str(raised.value))
    assert_states_equal(joined([fragments(again)]), joined([before]))
    assert again.global_steps == 0
    return messages


def test_a_mismatch_is_one_table_and_nothing_is_loaded(tmp_path):
    first, second = run_ranks(load_what_does_not_fit, 2, str(tmp_path))
    assert first == second
    for message in first:
        assert "nothing was loaded" in message
        for kind, name in (
            ("missing", "extra.weight"),
            ("unexpected", "unused.weight"),
            ("unexpected", "unused.bias"),
            ("shape", "blocks.1.fall.weight"),
        ):
            assert any(line.split()[:2] == [kind, name] for line in message.splitlines()), (kind, name, message)
        (shapes,) = (line for line in message.splitlines() if "blocks.1.fall.weight" in line)
        assert "(9, 24)" in shapes and "(9, 23)" in shapes


@on_ranks(1)
def test_an_optimizer_without_states_misses_none(tmp_path: Path) -> None:
    def make(momentum: float = 0.0) -> DeepSpeedEngine:
        return engine_of(tower(), 2, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum))

    engine = make()
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    for momentum, count in ((0.0, 0), (0.9, 1)):
        other = make(momentum)
        with mock.patch.object(load, "log_dist") as logged:
            other.load_checkpoint(tmp_path)
        assert sum("no optimizer state" in call.args[0] for call in logged.call_args_list) == count


def continue_with_saved_momentum(folder: str, momentum: float, other: float):
    def sgd(value: float, seed: int):
        chosen = {"type": "SGD", "params": {"lr": 0.01, "momentum": value}}
        return saved_engine(2, "bf16", seed=seed, optimizer=chosen, scheduler=None)

    run = sgd(momentum, 3)
    train_steps(run, range(2))
    run.save_checkpoint(folder)
    continued = sgd(other, 5)
    continued.load_checkpoint(folder)
    return train_steps(run, range(2, 5)), train_steps(continued, range(2, 5))


@pytest.mark.parametrize(("momentum", "other"), [(0.9, 0.0), (0.0, 0.9)])
def test_states_follow_the_restored_hyperparameters(momentum, other, tmp_path):
    for expected, found in run_ranks(continue_with_saved_momentum, 2, str(tmp_path), momentum, other):
        assert found == expected


@on_ranks(1)
def test_an_option_that_the_optimizer_does_not_have_is_not_restored(tmp_path: Path) -> None:
    def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)

    engine = engine_of(tower(), 1, optimizer=amsgrad)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="with")
    engine.destroy()
    engine = engine_of(tower(), 1)  # its update on flat runs has no amsgrad
    with mock.patch.object(load, "log_dist") as logged:
        engine.load_checkpoint(tmp_path, tag="with")
    notes = "\n".join(call.args[0] for call in logged.call_args_list)
    assert "param group 0 was saved with amsgrad=True, which this AdamW was built without" in notes
    assert not engine.optimizer.param_groups[0]["amsgrad"]
    engine.save_checkpoint(tmp_path, tag="without")
    engine.destroy()
    engine = engine_of(tower(), 1, optimizer=amsgrad)
    engine.load_checkpoint(tmp_path, tag="without")
    train(engine, 2)  # the group asks for no state that the checkpoint has not
    engine.destroy()


def filled_by_a_function(folder: Path) -> str:
    def make() -> DeepSpeedEngine:
        return engine_of(tower(), 1, bf16={"enabled": True})

    def fill(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict(src)
        with torch.no_grad():
            dst.first.bias.fill_(2.0)

    def refuse(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        if dist.get_rank() == 1:
            raise LookupError("not this one")

    engine = make()
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    expected = fragments(engine)
    engine.destroy()
    engine = make()
    engine.load_checkpoint(folder, custom_load_fn=fill)
    for (kind, name), values in fragments(engine).items():
        if name == "first.bias" and kind in ("compute", "master"):
            assert all(bool((part == 2).all()) for _, part in values)
        else:
            assert_states_equal(values, expected[kind, name])
    with pytest.raises((CheckpointError, LookupError)) as raised:
        engine.load_checkpoint(folder, custom_load_fn=refuse)
    engine.load_checkpoint(folder)
    assert_states_equal(fragments(engine), expected)
    engine.destroy()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_function_fills_the_model_and_keeps_masters_or_fails_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(filled_by_a_function, 2, tmp_path, timeout=60)
    assert "custom_load_fn failed on rank 1: LookupError: not this one" in found[0]
    assert found[1] == "LookupError: not this one"
