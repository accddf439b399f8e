"""``offload_states`` and ``reload_states``: training continues bit for bit, memory leaves and comes back."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.engine import offloading
from deepspeed.errors import CallOrderError
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.zero.storage import Tier
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import make_batch
from tests.offload.training import Trained, collect, config, make_engine, train_some


def interrupted(settings: dict[str, Any], kinds: list[Any] | None) -> tuple[Trained, Trained]:
    """Trains with and without states going to the host and back in between."""
    plain = make_engine(settings)
    expected = collect(plain, train_some(plain, range(4)))
    plain.destroy()
    engine = make_engine(settings)
    memory_tracker = engine._runtime.memory_tracker
    norms = train_some(engine, range(2))
    weights = [master.flat.clone() for master in engine._runtime.masters]
    engine.optimizer.count_state()
    before = memory_tracker.live_at(Tier.DEVICE)
    engine.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=False)
    engine.optimizer.offload_states(include=kinds)  # the same method; nothing is left to move
    engine.optimizer.count_state()
    assert memory_tracker.live_at(Tier.DEVICE) < before
    if kinds is None:
        assert memory_tracker.live_at(Tier.DEVICE) == 0, memory_tracker._live
    for master, values in zip(engine._runtime.masters, weights, strict=True):
        assert torch.equal(master.flat, values)  # readable while away
    with pytest.raises(CallOrderError, match="reload_states"):
        engine.step()
    if kinds is None:
        with pytest.raises(CallOrderError, match="lp_params"):
            engine(make_batch(0, 0, dist.get_rank()))
    engine.optimizer.reload_states()
    engine.reload_states()
    engine.optimizer.count_state()
    assert memory_tracker.live_at(Tier.HOST) == 0
    got = collect(engine, norms + train_some(engine, range(2, 4)))
    engine.destroy()
    return got, expected


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_continues(ranks: int, stage: int) -> None:
    precision = "bf16" if stage != 2 else "fp32"
    for got, expected in run_ranks(interrupted, ranks, config(stage, precision=precision), None):
        for part in ("norms", "compute", "masters", "states"):
            assert_states_equal(getattr(got, part), getattr(expected, part))


def host_and_back(every: list[dict[str, Any]]) -> None:
    """Masters that live elsewhere follow the compute parameters, which move."""
    for settings in every:
        results = []
        for moves in (False, True):
            engine = make_engine(settings)
            train_some(engine, range(1))
            if moves:
                engine.offload_states(include=["lp_params"])
                engine.reload_states()
            train_some(engine, range(1, 3))
            results.append(collect(engine, []))
            engine.destroy()
        for part in ("compute", "masters"):
            assert_states_equal(getattr(results[1], part), getattr(results[0], part))


def test_parameters_whose_masters_are_offloaded() -> None:
    host = {"offload_optimizer": {"device": "cpu"}}
    every = [config(stage, precision=precision, **host) for stage in (1, 3) for precision in ("bf16", "fp32")]
    run_ranks(host_and_back, 2, every)


@on_ranks(1)
def test_copies_are_over_when_a_move_returns() -> None:
    """The host reads what is away at once, and what came back leaves locked pages that nobody else keeps."""
    waits: list[str] = []
    engine = make_engine(config(0, precision="bf16"))
    with (
        mock.patch.object(engine._runtime, "host_is_device", False),
        mock.patch.object(offloading.get_accelerator(), "synchronize", lambda: waits.append("")),
    ):
        engine.offload_states(non_blocking=True)
        assert len(waits) == 1
        engine.reload_states(non_blocking=True)
        assert len(waits) == 2
    engine.destroy()


def test_single_kinds() -> None:
    kinds = [OffloadStateTypeEnum.optim_states, "hp_params"]
    for got, expected in run_ranks(interrupted, 2, config(3, precision="bf16"), kinds):
        assert_states_equal(got.masters, expected.masters)


def pending_gradients(settings: dict[str, Any]) -> None:
    """Gradients of the first micro-batch survive a stay on the host."""
    results = []
    for moves in (False, True):
        engine = make_engine(settings)
        for micro in range(2):
            losses = engine(make_batch(0, micro, dist.get_rank()))
            engine.backward(losses.loss)
            if moves and micro == 0:
                engine.offload_states()
                engine.reload_states()
            engine.step()
        results.append(collect(engine, []).masters)
        engine.destroy()
    assert_states_equal(results[1], results[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_pending_gradients(ranks: int) -> None:
    run_ranks(pending_gradients, ranks, config(1, precision="bf16", accumulation=2))
    run_ranks(pending_gradients, ranks, config(3, precision="bf16", accumulation=2))


@on_ranks(2)
def test_sleep() -> None:
    """Freed bytes are those of the formula; twice, with a save, in any order; training is that of a twin."""
    settings = config(3, precision="bf16")
    plain = make_engine(settings)
    expected = collect(plain, train_some(plain, range(4)))
    plain.destroy()
    engine = make_engine(settings)
    norms = train_some(engine, range(2))
    padded = sum(master.flat.numel() for master in engine._runtime.masters)
    of_optimizer = 4 * padded + engine.optimizer.count_state()  # an unused parameter has no moments
    with engine.sleep() as report:
        # Weights in bf16, masters, and two moments; small parameters are whole on each rank.
        assert of_optimizer + 2 * padded <= report.freed_bytes <= 1.02 * of_optimizer + 4 * padded
        with engine.sleep() as second:
            assert second.freed_bytes == 0
        with pytest.raises(CallOrderError, match=r"engine\.wake\(\)"):
            engine.step()
    engine.wake()
    kept = engine.sleep(keep=["lp_params"])
    assert kept.freed_bytes == of_optimizer < report.freed_bytes
    with torch.no_grad():
        engine(make_batch(0, 0, dist.get_rank()))
    engine.wake()
    got = collect(engine, norms + train_some(engine, range(2, 4)))
    for part in ("norms", "compute", "masters", "states"):
        assert_states_equal(getattr(got, part), getattr(expected, part))
    with pytest.raises(ValueError, match="found \\['weights'\\]"):
        engine.sleep(keep=["weights"])
    engine.destroy()


@on_ranks(1)
def test_wrong_arguments() -> None:
    engine = make_engine(config(2))
    with pytest.raises(ValueError, match="host memory only"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ValueError, match="unknown"):
        engine.offload_states(include=["weights"])
    engine.destroy()
