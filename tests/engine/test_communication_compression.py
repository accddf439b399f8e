"""The section ``communication_compression``: what it makes of gradients and weights, when, and what it logs."""

import logging
from typing import Any

import torch
from torch import nn

from deepspeed.comm.base.codec import coded_nbytes
from deepspeed.comm.base.counters import counted
from deepspeed.comm.codecs.table import Int8Codec, SignCodec
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.engine import DeepSpeedEngine, communication_compression
from deepspeed.logging import logger
from deepspeed.zero.gradient.trial import UPDATES, Trial
from tests.config.support import only_problem, problems
from tests.engine.support import engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower


class Lines(logging.Handler):
    """Keeps what is logged while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self):
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)

    def about(self, word: str) -> list[str]:
        return [line for line in self.texts if word in line]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compressed(stage: int, section: dict[str, Any], **settings: Any) -> DeepSpeedEngine:
    settings.setdefault("optimizer", sgd)
    return engine_of(tower(), stage, communication_compression=section, **settings)


def run_step(engine: DeepSpeedEngine, step: int) -> None:
    engine.backward(engine(inputs(step, rank())))
    engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


@on_ranks(2)
def test_codes_begin_at_their_step() -> None:
    with Lines() as lines:
        engine, plain = compressed(2, {"gradients": "sign", "start_step": 2}), compressed(2, {})
    texts = lines.about("communication_compression")
    if rank() == 0:
        (line,) = texts
        assert "sign codes from update 3 on: 1.02 bits" in line and "with error feedback" in line
    for step in range(3):
        with Lines() as lines, counted() as traffic:
            run_step(engine, step)
            moved = traffic.requested["swap"].nbytes
        run_step(plain, step)
        ours, theirs = weights(engine), weights(plain)
        equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert equal is (step < 2)
        if rank() == 0:
            assert len(lines.about("as codes from now on")) == (step == 1)
        buckets = engine._runtime.reducer.buckets
        codes = sum(coded_nbytes(SignCodec(2048), g.bucket.layout.slice_numel) + g._rows.nbytes for g in buckets)
        assert moved == (codes if step == 2 else 0)
    assert same_on_all_ranks({name: value.sum().item() for name, value in weights(engine).items()})
    engine.destroy()
    with Lines() as lines:
        late = compressed(0, {"gradients": "int4", "start_step": 9})
        run_step(late, 0)
        late.destroy()
    assert rank() or len(lines.about("training ends before update 10, the first with")) == 1


@on_ranks(2)
def test_early_updates_may_have_another_codec() -> None:
    """Until start_step they are sent with the codec of warm_up, bit for bit as with that codec from the start."""
    both = {"gradients": "sign", "start_step": 2, "warm_up": "int8"}
    for stage in (0, 2):
        with Lines() as lines:
            engine, first = compressed(stage, both), compressed(stage, {"gradients": "int8"})
        assert rank() or any("until then as int8" in line for line in lines.texts)
        for step in range(3):
            with counted() as traffic:
                run_step(engine, step)
                moved = traffic.requested["swap"].nbytes
            run_step(first, step)
            ours, theirs = weights(engine), weights(first)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs) is (step < 2)
            lost = torch.cat([gradients.feedback.tensor for gradients in engine._runtime.reducer.buckets])
            assert bool(lost.any()) is (step == 2)  # what int8 loses is not kept
            codec = SignCodec(2048) if step == 2 else Int8Codec()
            buckets = engine._runtime.reducer.buckets
            codes = sum(coded_nbytes(codec, one.bucket.layout.slice_numel) for one in buckets)
            assert codes <= moved <= 1.01 * codes + 8 * sum(one._rows.nbytes for one in buckets)
        engine.destroy()
        first.destroy()


@on_ranks(2)
def test_weights_are_sent_as_codes_at_stage_3() -> None:
    engine = compressed(3, {"weights": "int8", "gradients": "int8"})
    assert engine._runtime.reducer.buckets[0].feedback is None  # int8 goes without
    with counted() as traffic:
        run_step(engine, 0)
        names = set(traffic.requested)
    assert "swap" in names
    sharded = [bucket for bucket in engine._runtime.buckets if bucket.is_sharded]
    assert sharded and all(not bucket._compute_transport.is_exact for bucket in sharded)
    assert isinstance(sharded[0]._compute_transport.codec, Int8Codec)


@on_ranks(1)
def test_one_rank_logs_that_nothing_is_sent() -> None:
    with Lines() as lines:
        engine = compressed(2, {"gradients": "int4"})
    assert len(lines.about("nothing is sent")) == 1
    run_step(engine, 0)
    engine.destroy()


def test_contradictions_are_refused_by_name() -> None:
    at = "communication_compression"
    assert "stage 3 only" in only_problem({at: {"weights": "int8"}, "zero_optimization": {"stage": 2}})
    assert "power of 2" in only_problem({at: {"gradients": "sign", "block": 96}})
    assert "keep one" in only_problem({at: {"gradients": "auto", "warm_up": "int8"}})
    zero = {"stage": 3, "zero_quantized_gradients": True}
    found = problems({at: {"gradients": "int4"}, "zero_optimization": zero})
    assert any(f"{at}.gradients: does the same as zero_optimization.zero_quantized_gradients" in one for one in found)


def trial_of(seconds: dict[bool, float]) -> tuple[list[bool], Trial]:
    """What a trial reports for each update, where updates take so long."""
    now, texts = 0.0, []
    trial = Trial(lambda: now)
    for _ in range(UPDATES + 3):
        texts.append(trial.next(LocalTransport()))
        now += seconds[texts[-1]] + 100.0 * (len(texts) <= 2)  # the first ones are slow
    return texts, trial


def test_a_trial_keeps_the_faster_way() -> None:
    texts, trial = trial_of({False: 2.0, True: 1.0})
    assert texts[-3:] == [True] * 3 and "takes 1 s with codes and 2 s without" in trial.outcome
    assert texts[:UPDATES].count(True) == 7 and not texts[0]
    texts, trial = trial_of({False: 1.0, True: 1.01})
    assert texts[-3:] == [False] * 3


def measured(paces: tuple[float, float, float]) -> None:
    original = communication_compression.reduction_seconds
    with Lines() as lines:
        engine = compressed(0, {"gradients": "auto"})
        run_step(engine, 0)
        engine.destroy()
    assert rank() or len(lines.about("takes")) == 1  # whatever it was
    to_owner = []

    def seconds(*_args: Any, **options: Any) -> list[float]:
        to_owner.append(options["to_owner"])
        return list(paces)

    communication_compression.reduction_seconds = seconds
    try:
        for stage in (0, 1):
            compressed(stage, {"gradients": "auto"}).destroy()
        with Lines() as lines:
            engine = compressed(2, {"gradients": "auto", "start_step": 1})
            for step in range(UPDATES + 3):
                run_step(engine, step)
        assert to_owner == [False, True, True]  # what is measured is what the stage does
        has_codes = paces[2] * 1.1 < paces[0]
        assert (engine._runtime.reducer.buckets[0].feedback is not None) is has_codes
        if rank() == 0:
            assert len(lines.about("communication_compression")) == 1
            assert len(lines.about("from now on: an update takes")) == has_codes
        assert same_on_all_ranks({name: value.sum().item() for name, value in weights(engine).items()})
        assert same_on_all_ranks(engine._runtime.reducer.is_coded)
        engine.destroy()
    finally:
        communication_compression.reduction_seconds = original


def test_auto_measures_the_link() -> None:
    run_ranks(measured, 2, (1.0, 0.5, 0.3))
    run_ranks(measured, 2, (1.0, 1.5, 0.95))
