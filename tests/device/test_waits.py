"""How often the host waits for the device."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.comm.job.connect import channel_over
from deepspeed.comm.transports import native
from deepspeed.errors import DivergenceError
from deepspeed.moe.layer import MoE
from deepspeed.parallel.tensor.batches import BatchCheck, Fingerprints
from tests.device.support import batch, engine_at, step
from tests.harness.device import simulated_device
from tests.harness.toy_models import tower

# How often the host waits for its device in one update, and what the computation does not wait for.


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


# How often the host waits for the device: every wait empties the device's queue.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_of_experts_waits_once_in_forward_and_not_in_backward(ranks: int, k: int) -> None:
    with simulated_device(ranks=ranks) as device:
        layer = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=ranks, k=k).to("cuda")
        x = torch.randn(12, 8).to("cuda").requires_grad_()
        layer(x)  # connects the ranks
        before = device.clocks.waits
        out, balance, _ = layer(x)
        assert device.clocks.waits - before == 1
        before = device.clocks.waits
        (out.float().square().sum() + balance).backward()
        assert device.clocks.waits == before


def test_the_check_of_the_batch_waits_for_nothing() -> None:
    with simulated_device(ranks=2) as device:
        model = nn.Linear(4, 4).to("cuda")
        transport = device.world.transport(torch.device("cuda", 0))
        check = BatchCheck(channel_over(transport))
        check.attach(model)
        x = torch.randn(3, 4).to("cuda")
        model(x)  # sends the weights of the fingerprints up
        before = device.clocks.waits
        for _ in range(3):
            model(x)
        assert device.clocks.waits == before
        assert len(check._coming) == 4  # the device is behind
        device.accelerator.synchronize()
        model(x)
        assert len(check._coming) == 1


def test_a_difference_is_named_one_forward_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_device(ranks=2) as device:
        model = nn.Linear(4, 4).to("cuda")
        channel = channel_over(device.world.transport(torch.device("cuda", 0)))
        BatchCheck(channel).attach(model)
        real = channel.gather

        def gather(values: torch.Tensor, lengths: list[int], label: str) -> list[torch.Tensor]:
            mine, other = real(values, lengths, label)
            return [mine, other + torch.arange(len(other), device="cuda").eq(2)]

        monkeypatch.setattr(channel, "gather", gather)
        x = torch.randn(3, 4).to("cuda")
        model(x)
        device.accelerator.synchronize()
        with pytest.raises(DivergenceError, match=r"'argument 0' differs .*argument 0 \(3, 4\), in an earlier forward"):
            model(x)


def test_fingerprints_differ_with_every_byte() -> None:
    prints = Fingerprints()
    x = torch.arange(70_003, dtype=torch.int32)
    known = {int(prints.of(x)), int(prints.of(x.view(1, -1))), int(prints.of(x.to(torch.int64)))}
    assert len(known) == 3 and int(prints.of(x.clone())) in known
    for place in (0, 1, 66_000, 70_002):
        changed = x.clone()
        changed[place] += 1
        known.add(int(prints.of(changed)))
    assert len(known) == 7
    flags = torch.zeros(5, dtype=torch.bool)
    assert int(prints.of(flags)) != int(prints.of(~flags)) and int(prints.of(flags[:0])) != 0
