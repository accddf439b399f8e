"""Updates on the host that begin while the device still makes gradients: in which order, and after which waits."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from deepspeed.offload.host import HostGradientDestination
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.update.speculation import ShadowMaster, SpeculativeUpdate
from deepspeed.zero.update.step_agreement import StepAgreement
from tests.device.support import engine_at, step
from tests.harness.device import OrderError, simulated_device

SPECULATING = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
CELLS = ((1, 2, "bf16", 1, {}), (2, 1, "fp16", 3, {}), (3, 2, "bf16", 2, {}), (3, 2, "fp16", 1, {"device": "cpu"}))


@contextmanager
def _noted(log: list[str]) -> Iterator[None]:
    """Inside, what happens is written into ``log``, in its order."""
    with ExitStack() as stack:
        for owner, name, word in (
            (GradientReducer, "arrive", "gradient"),
            (SpeculativeUpdate, "compute", "update"),
            (StepAgreement, "exchange", "norm"),
        ):
            real = getattr(owner, name)

            def noted(*args: Any, real: Any = real, word: str = word, **kwargs: Any) -> Any:
                log.append(word)
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(owner, name, noted))
        yield


def _train(stage: int, ranks: int, precision: str, accumulation: int, param: dict[str, str]) -> tuple[list[str], Any]:
    zero = {**SPECULATING, **({"offload_param": param} if param else {})}
    log: list[str] = []
    with simulated_device(ranks=ranks):
        engine = engine_at(stage, precision=precision, accumulation=accumulation, zero=zero, gradient_clipping=0.0)
        for number in range(2):
            step(engine, number)
        with _noted(log):
            step(engine, 2)
        step(engine, 3)
        speculation = engine.inspect().updater.speculation
        engine.destroy()
    return log, speculation


@pytest.mark.parametrize(("stage", "ranks", "precision", "accumulation", "param"), CELLS)
def test_updates_begin_while_gradients_arrive(
    stage: int, ranks: int, precision: str, accumulation: int, param: dict[str, str]
) -> None:
    log, speculation = _train(stage, ranks, precision, accumulation, param)
    last_gradient = len(log) - 1 - log[::-1].index("gradient")
    updates = [place for place, word in enumerate(log) if word == "update"]
    assert updates and updates[0] < last_gradient, log
    assert log[-1] == "norm" and log.count("norm") == 1
    assert speculation.kept >= 3 * len(updates) - 1 and speculation.discarded == 0


@pytest.mark.parametrize(
    ("owner", "finding"),
    [
        (HostGradientDestination, "the host (reads|writes to) page-locked"),
        (ShadowMaster, "freed .* before its last use on stream"),
    ],
)
def test_each_wait_is_needed(owner: type, finding: str) -> None:
    with mock.patch.object(owner, "wait", lambda *_: None), pytest.raises(OrderError, match=finding):
        _train(1, 2, "bf16", 1, {})
