"""Updates that begin before the norm is known give the bits of those that do not, whatever is found out later."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

import deepspeed
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.update.speculation import HostWorker, InlineWorker, workers_from
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups
from tests.offload.training import collect, config, make_engine, train_some
from tests.parallel.pipe import support as pipes

ROWS: dict[str, dict[str, Any]] = {
    "nothing is clipped": {"clip": 0.0},
    "everything is clipped": {"clip": 0.01},
    "some is clipped": {"clip": None},  # by the norm in the middle
    "a gradient overflows": {"clip": 0.0, "precision": "fp16", "overflow_at": 3},
    "16 bit, two micro-batches": {"clip": 0.0, "precision": "bf16", "accumulation": 2},
}
STEPS = 6


def _settings(stage: int, *, speculates: bool, ratio: float = 1.0, **row: Any) -> dict[str, Any]:
    section = {"device": "cpu", "super_offload": speculates, "ratio": ratio}
    made: dict[str, Any] = config(stage, reduce_bucket_size=900, offload_optimizer=section, **row)
    return made


def _trained(settings: dict[str, Any], overflow_at: int, make: Callable[[], HostWorker]) -> tuple[Any, Any]:
    with workers_from(make):
        engine = make_engine(settings)
        found = collect(engine, train_some(engine, range(STEPS), overflow_at))
        engine.destroy()
    return found, engine.inspect().updater.speculation


def _compare(stage: int, names: tuple[str, ...], makes: tuple[Callable[[], HostWorker], ...]) -> dict[str, Any]:
    counts: dict[str, tuple[int, int]] = {}
    norms: list[float] = []
    for name in names:
        row = dict(ROWS[name])
        overflow_at = row.pop("overflow_at", -1)
        if row["clip"] is None:
            row["clip"] = sorted(norms)[STEPS // 2]
        expected, nothing = _trained(_settings(stage, speculates=False, **row), overflow_at, HostWorker)
        assert nothing is None
        norms = norms or expected.norms
        for make in makes:
            got, speculation = _trained(_settings(stage, speculates=True, **row), overflow_at, make)
            for part in ("norms", "compute", "masters", "states"):
                assert_states_equal(getattr(got, part), getattr(expected, part))
            assert [c == f for kind, c, f, _ in got.rows if kind.startswith("shadow")] == [True]
        counts[name] = speculation.kept, speculation.discarded
    return counts


def _check(counts: dict[str, tuple[int, int]]) -> None:
    for name, (kept, discarded) in counts.items():
        assert (kept > 0) == (name != "everything is clipped"), (name, kept, discarded)
        if name not in ("nothing is clipped", "16 bit, two micro-batches"):
            assert discarded > 0, (name, kept, discarded)


def test_the_bits_are_those_of_an_update_after_the_norm() -> None:
    names = ("nothing is clipped", "some is clipped", "a gradient overflows")
    for stage in (1, 3):
        for counts in run_ranks(_compare, 2, stage, names, (InlineWorker,)):
            _check(counts)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_everywhere_with_a_thread_too(ranks: int, stage: int) -> None:
    for counts in run_ranks(_compare, ranks, stage, tuple(ROWS), (HostWorker, InlineWorker), timeout=240):
        _check(counts)


COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"zero_hpz_partition_size": 2, "precision": "bf16"},
    {"mics_shard_size": 2},
    {"ratio": 0.5, "precision": "bf16", "accumulation": 2},
    {"offload_param": {"device": "cpu"}, "precision": "fp16"},
    {"zero_quantized_gradients": True, "zero_quantized_weights": True},
    {"overlap_comm": False, "precision": "bf16"},
)


@pytest.mark.slow
@on_ranks(4, timeout=240)
def test_with_other_ways_to_share_and_to_send() -> None:
    kept = []
    for given in COMBINATIONS:
        found = []
        for speculates in (False, True):
            trained, speculation = _trained(_settings(3, speculates=speculates, clip=0.0, **given), -1, InlineWorker)
            found.append(trained)
        for part in ("norms", "compute", "masters", "states"):
            assert_states_equal(getattr(found[1], part), getattr(found[0], part))
        kept.append(speculation.kept)
    assert all(kept), kept


@pytest.mark.slow
@on_ranks(4)
def test_stages_of_a_pipeline_with_tied_weights() -> None:
    found = []
    for speculates in (False, True):
        section = {"device": "cpu", "super_offload": speculates}
        zero = {"stage": 1, "reduce_bucket_size": 100, "offload_optimizer": section}
        with workers_from(InlineWorker):
            engine = pipes.engine_of(2, 1, 3, {"gradient_clipping": 0.0, "zero_optimization": zero})
            losses, weights = pipes.train(engine, 3, 4), pipes.weights(engine)
            kept = engine.inspect().updater.speculation.kept if speculates else 0
            engine.destroy()
        found.append((losses, weights))
    assert_states_equal(found[1], found[0])
    assert kept


def _scale(parameter: torch.nn.Parameter, get: Callable[..., Any], put: Callable[..., None], *name: str) -> None:
    put(parameter, get(parameter, *name) * 0.5, *name)


def _interfere(engine: Any, what: str, folder: str) -> None:
    """What a program may do between the backward and the step."""
    parameter, utils = engine.module.blocks[1].rise.weight, deepspeed.utils
    if what == "master":
        _scale(parameter, utils.safe_get_full_fp32_param, utils.safe_set_full_fp32_param)
    elif what == "gradient":
        _scale(parameter, utils.safe_get_full_grad, utils.safe_set_full_grad)
    elif what == "state":
        state = utils.safe_get_full_optimizer_state(parameter, "exp_avg") * 0.5
        utils.safe_set_full_optimizer_state(parameter, state, "exp_avg")
    elif what == "rate":
        engine.optimizer.param_groups[0]["lr"] *= 0.5
    elif what == "parameter":
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.mul_(0.5)
    elif what == "zero_grad":
        engine.zero_grad()
    elif what == "load":
        engine.load_checkpoint(folder)
    elif what == "save":
        engine.save_checkpoint(folder, tag="between")
        engine.load_checkpoint(folder, tag="between")


INTERFERENCES = ("master", "gradient", "state", "rate", "parameter", "zero_grad", "load", "save")


@pytest.mark.parametrize(("stage", "precision"), [pytest.param(1, "fp32", marks=pytest.mark.slow), (3, "bf16")])
@on_ranks(2)
def test_what_a_program_does_after_backward_counts(stage: int, precision: str, folder: str) -> None:
    kinds = INTERFERENCES
    for what in kinds:
        found = []
        for speculates in (False, True):
            with workers_from(InlineWorker):
                engine = make_engine(_settings(stage, speculates=speculates, precision=precision, clip=0.0))
                train_some(engine, range(3))
                engine.save_checkpoint(folder)
                losses = losses_of(engine(make_batch(3, 0, dist.get_rank(), branch=False)))
                engine.backward(losses.loss + losses.auxiliary)
                if speculates:
                    assert engine.inspect().updater.speculation._open
                _interfere(engine, what, folder)
                engine.step()
                train_some(engine, range(4, 6))
                found.append(collect(engine, []))
                engine.destroy()
        for part in ("compute", "masters", "states"):
            assert_states_equal(getattr(found[1], part), getattr(found[0], part))


@on_ranks(1)
def test_it_is_tried_less_often_where_it_is_always_wrong() -> None:
    with workers_from(InlineWorker):
        engine = make_engine(_settings(2, speculates=True, clip=0.001))
        discards = []
        for step in range(12):
            train_some(engine, range(step, step + 1))
            discards.append(engine.inspect().updater.speculation.discarded)
        engine.destroy()
    tried = [later > before for before, later in zip(discards, discards[1:], strict=False)]
    assert sum(tried) == 4, tried  # with pauses of 0, 1 and 3 updates between them


class _StartedWorker(HostWorker):
    """Returns from ``submit`` once the thread runs the job, so that the step finds it started on any machine."""

    @override
    def submit(self, job: Callable[[], None]) -> Future[None]:
        started = threading.Event()

        def run() -> None:
            started.set()
            job()

        submitted = super().submit(run)
        started.wait()
        return submitted


def _failing(*_: Any, **__: Any) -> None:
    raise ArithmeticError("in the worker")


@on_ranks(1)
def test_an_error_in_the_thread_is_raised_by_the_step() -> None:
    with workers_from(_StartedWorker):
        engine = make_engine(_settings(2, speculates=True, clip=0.0))
    train_some(engine, range(3))
    with mock.patch("deepspeed.zero.update.speculation.update_chunk", _failing), pytest.raises(ArithmeticError):
        train_some(engine, range(3, 4))
    engine.destroy()


def _refused() -> None:
    model = awkward()
    given = {key: value for key, value in _settings(1, speculates=True).items() if key != "optimizer"}
    with pytest.raises(DeepSpeedConfigError, match="super_offload with the optimizer RMSprop"):
        deepspeed.initialize(model=model, optimizer=torch.optim.RMSprop(param_groups(model)), config=given)


def test_what_it_cannot_do_is_refused() -> None:
    run_ranks(_refused, 1)
    with pytest.raises(DeepSpeedConfigError, match=r'super_offload.*device "cpu", found "nvme"'):
        section = {"device": "nvme", "nvme_path": "/nowhere", "super_offload": True}
        parse({"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": section}})
