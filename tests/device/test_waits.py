"""How often the host waits for its device in one update, and what the computation does not wait for."""

from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.comm.transports import native
from tests.device.support import batch, engine_at, step
from tests.harness.device import simulated_device
from tests.harness.toy_models import tower


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_an_update_waits_twice_at_most(stage: int, ranks: int, precision: str) -> None:
    """However many buckets there are, with clipping."""
    with simulated_device(ranks=ranks) as device:
        engine = engine_at(stage, model=tower(depth=5), precision=precision, gradient_clipping=0.5)
        assert len(engine._runtime.buckets) >= 4
        for number in range(3):
            loss = engine(batch(engine, number))
            before = device.clocks.waits
            engine.backward(loss)
            in_backward, before = device.clocks.waits - before, device.clocks.waits
            engine.step()
            in_update = device.clocks.waits - before
        assert in_backward == 0 and 0 < in_update <= 2  # the first step also agrees on orders
        engine.destroy()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_counts_on_the_device_are_read_at_once(micro_batches: int) -> None:
    """A third wait of the update, however many micro-batches have a count there."""
    with simulated_device(ranks=2) as device:
        engine = engine_at(1, model=tower(depth=2), gradient_accumulation_steps=micro_batches)
        for number in range(2 * micro_batches):
            loss = engine(batch(engine, number))
            count = torch.tensor(5).to("cuda")
            engine.backward(loss, count=count)
            before = device.clocks.waits
            engine.step()
        assert device.clocks.waits - before <= 3
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_computation_does_not_wait_for_what_follows_a_reduction(stage: int) -> None:
    """Casting, scaling and the squares of a reduced gradient are queued on another stream than the computation."""
    with simulated_device(ranks=2) as device:
        engine = engine_at(stage, model=tower(depth=5), gradient_clipping=0.5)
        streams = []
        scaled_sum = native.scaled_sum

        def recording_sum(*args: Any) -> None:
            streams.append(device.accelerator.current_stream())
            scaled_sum(*args)

        with mock.patch.object(native, "scaled_sum", recording_sum):
            for number in range(2):
                step(engine, number)
        assert len(streams) == 2 * len(engine._runtime.reducer.buckets)
        assert device.accelerator.default_stream() not in streams and len(set(streams)) == 1
        engine.destroy()
