"""Mistakes of the first hour: a step that nobody calls, an optimizer that updates nothing, inputs of another dtype."""

import gc

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import adamw, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower


def heads(lines: list[str], end: str, *expected: str) -> None:
    """The beginnings of rank 0's lines are these; the other ranks log nothing."""
    assert [line.split(end)[0] for line in lines] == ([*expected] if rank() == 0 else [])


def forgotten_step() -> None:
    engine = engine_of(tower(), 2, accumulation=2)
    for number in range(30):  # two backwards to a step are nobody's mistake
        with logged() as lines:
            engine.backward(engine(inputs(number)))
            if number % 2:
                engine.step()
        assert lines == []
    with engine.no_sync(), logged() as lines:
        for number in range(10):
            engine.backward(engine(inputs(number)))
    assert lines == []
    with logged() as lines:
        for number in range(50):
            engine.backward(engine(inputs(number)))
    heads(lines, ":", "engine.step has not been called in 8 backwards")
    engine.destroy()


def second_optimizer() -> None:
    for stage in (0, 3):
        model = tower()
        engine = engine_of(model, stage)
        second, foreign = adamw(model), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        engine.backward(engine(inputs(0)))
        with logged() as lines:
            engine.step()
            foreign.step()
        assert lines == []
        with logged() as lines:
            second.step()
            second.step()
        heads(lines, ",", "AdamW.step: 20 of its parameters are trained by an engine")
        with logged() as lines:
            engine.destroy()
        heads(lines, ":", *([] if stage == 0 else ["engine.destroy"]))


def one_hook_for_all_engines() -> None:
    """It stays when engines end: they may be collected while torch goes through its hooks."""
    before = dict(_global_optimizer_pre_hooks)
    engine_of(tower(), 0).destroy()
    gc.collect()
    assert before and before == _global_optimizer_pre_hooks


def other_dtypes(stage: int, section: str, dtype: torch.dtype) -> None:
    def linear() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 1))

    engine = engine_of(linear(), stage, **{section: {"enabled": True}})
    text = f"{section}.enabled makes the model compute in {dtype}, .* argument 0 in torch.float32.*{section}.auto_cast"
    with pytest.raises(DeepSpeedConfigError, match=text) as caught:
        engine(inputs(0))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):  # of another reason torch speaks itself
        engine(inputs(0).to(dtype)[:, :4])
    engine.backward(engine(inputs(0).to(dtype)).float().mean())
    engine.step()
    casting = engine_of(linear(), stage, **{section: {"enabled": True, "auto_cast": True}})
    assert casting(inputs(0)).dtype == dtype


@on_ranks(2)
def test_mistakes_of_the_first_hour_are_named() -> None:
    forgotten_step()
    second_optimizer()
    one_hook_for_all_engines()
    other_dtypes(0, "fp16", torch.float16)
    other_dtypes(3, "bf16", torch.bfloat16)
