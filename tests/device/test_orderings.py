"""Streams wait for each other where the result needs it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import save
from deepspeed.checkpoint.format import Manifest
from deepspeed.comm.job.fake import FakeGroup
from deepspeed.offload.files import FileMemory
from deepspeed.offload.host import HostGradientDestination, HostMemory
from deepspeed.offload.pinned import page_buffer
from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.parallel.sequence.chunked import chunked_attention
from deepspeed.parallel.sequence.host_chunks import HostChunks
from deepspeed.sequence.fpdt_layer import FPDT_Attention
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.update.speculation import ShadowMaster, SpeculativeUpdate
from deepspeed.zero.update.step_agreement import StepAgreement
from tests.device.support import batch, engine_at, evaluate, step
from tests.harness.device import OrderError, simulated_device
from tests.harness.device.accelerator import SimulatedAccelerator
from tests.harness.toy_models import tower

# The orderings that offloading and saving rest on: with each of them the program is ordered, without it is not.


Undoing = Callable[[], AbstractContextManager[Any]]
Program = Callable[[Path], None]


def nothing(owner: type, name: str) -> Undoing:
    """Takes an ordering away: the method does nothing."""
    return lambda: mock.patch.object(owner, name, lambda *_: None)


def no_context(owner: type) -> Undoing:
    """Reads and the collective after them are queued wherever they happen to be."""
    return lambda: mock.patch.object(owner, "ordered", lambda _: nullcontext())


def an_evaluation_before_the_update(_folder: Path) -> None:
    """Nothing else makes the host wait: one rank, and the norm is taken of gradients on the host."""
    engine = engine_at(3, "both on the host")
    step(engine)
    engine.backward(engine(batch(engine, 4)))
    for parameter in engine.module.parameters():
        gradient = safe_get_full_grad(parameter)
        assert gradient is not None
        safe_set_full_grad(parameter, torch.ones_like(gradient))
    evaluate(engine)
    engine.step()
    engine.destroy()


def states_that_are_read_while_away(_folder: Path) -> None:
    engine = engine_at(1)
    step(engine)
    engine.offload_states(non_blocking=True)
    for master in engine._runtime.masters:
        master.flat.tolist()
    engine.reload_states()
    engine.destroy()


def states_that_come_back(_folder: Path) -> None:
    engine = engine_at(3)
    step(engine)
    engine.backward(engine(batch(engine, 2)))
    engine.offload_states()
    engine.reload_states(non_blocking=True)
    engine.step()
    step(engine, 3)
    engine.destroy()


def a_save_in_the_background(folder: Path) -> None:
    engine = engine_at(2, checkpoint={"async_save": True})
    step(engine)
    engine.save_checkpoint(str(folder), tag="one")
    engine.wait_for_checkpoint()
    engine.load_checkpoint(str(folder))
    step(engine)
    engine.destroy()


def three_updates(stage: int, tier: str, **settings: Any) -> Program:
    def run(folder: Path) -> None:
        engine = engine_at(stage, tier, folder, **settings)
        for number in range(3):
            step(engine, number)
        engine.destroy()

    run.__name__ = f"stage {stage}, {tier}"
    return run


ORDERINGS: tuple[tuple[Program, int, Undoing], ...] = (
    # the update writes shards in host memory that a gather may still read
    (an_evaluation_before_the_update, 1, nothing(CopyStream, "wait_on_host")),
    # what is away is there when offload_states returns
    (states_that_are_read_while_away, 1, nothing(SimulatedAccelerator, "synchronize")),
    # locked pages are given back after the copies from them
    (states_that_come_back, 2, nothing(SimulatedAccelerator, "synchronize")),
    # the copy for a background save is over when training continues
    (a_save_in_the_background, 1, nothing(SimulatedAccelerator, "synchronize")),
    # a gather sends this rank's slice after it has come up
    (three_updates(3, "both on the host"), 2, no_context(HostMemory)),
    (three_updates(3, "both in files"), 2, no_context(FileMemory)),
    # the update reads gradients that have come down, and reuses staging buffers that have gone up
    (three_updates(2, "optimizer on the host"), 2, nothing(CopyHandle, "wait_on_host")),
    # forward reads parameters that have come up
    (three_updates(2, "optimizer on the host"), 1, nothing(CopyHandle, "wait")),
)


@pytest.mark.parametrize(("program", "ranks", "undone"), ORDERINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_ordered_with_and_not_without(program: Program, ranks: int, undone: Undoing, tmp_path: Path) -> None:
    with simulated_device(ranks=ranks):
        program(tmp_path)
    with pytest.raises(OrderError), simulated_device(ranks=ranks), undone():
        program(tmp_path)


def test_reading_gathered_parameters_compares_on_one_device() -> None:
    """One rank holds all of an offloaded master; what a block has read is compared with it."""
    with simulated_device():
        engine = engine_at(3, "optimizer on the host")
        step(engine)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            pass
        engine.destroy()


def test_background_saves_lock_memory_of_the_size_of_the_state(tmp_path: Path) -> None:
    """Torch's allocator would round each tensor up to a power of two, and keep it for ever."""
    requested: list[int] = []
    with simulated_device():
        engine = engine_at(2, checkpoint={"async_save": True}, model=tower(6))
        step(engine)
        by_torch = mock.Mock(side_effect=torch.empty)

        def buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
            assert pin
            requested.append(nbytes)
            return page_buffer(nbytes, pin=pin)

        with mock.patch.object(save, "page_buffer", buffer), mock.patch.object(torch, "empty", by_torch):
            for tag in ("one", "two"):
                engine.save_checkpoint(str(tmp_path), tag=tag)
                step(engine)
            engine.wait_for_checkpoint()
        assert not any(call.kwargs.get("pin_memory") for call in by_torch.call_args_list)
        host = engine._checkpoints._made_saver._host
        assert host.nbytes == requested[0]
        engine.destroy()
        assert host.nbytes == 0
    files = Manifest.read(tmp_path / "two").files
    state = sum(part.nbytes for file in files for part in (*file.runs, *file.tensors))
    assert len(requested) == 1 and state <= requested[0] < 1.1 * state, (requested, state)


# Updates on the host that begin while the device still makes gradients: in which order, and after which waits.


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


# Attention over keys and values in host memory: copies run beside the computation, and the host does not wait.


CONFIG = SimpleNamespace(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=1, kv_channels=4, attention_dropout=0.0
)


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((12, 1, 8), (16, 8), (16,), (8, 8), (8,))]


def _layer(tensors: list[torch.Tensor], offload: bool) -> Any:
    layer = FPDT_Attention(CONFIG, *tensors[1:], FakeGroup((0,)), return_bias=False, chunk_size=4)
    return layer(tensors[0], None, None, None, cpu_offloading=offload)


def test_chunks_of_a_layer_wait_for_nothing_in_forward() -> None:
    with simulated_device() as device:
        found: dict[bool, list[torch.Tensor]] = {}
        for offload in (False, True):
            tensors = [tensor.to("cuda").requires_grad_() for tensor in _weights()]
            before = device.clocks.waits
            out = _layer(tensors, offload)
            assert device.clocks.waits == before
            out.square().sum().backward()
            assert device.clocks.waits - before <= (3 if offload else 0)  # one for each chunk of queries
            found[offload] = [out.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)]
        for one, other in zip(found[False], found[True], strict=True):
            torch.testing.assert_close(one, other)


def test_chunked_attention_waits_for_nothing() -> None:
    with simulated_device() as device:
        query, key, value = (torch.randn(1, 2, 10, 4).to("cuda").requires_grad_() for _ in range(3))
        before = device.clocks.waits
        chunked_attention(query, key, value, chunk_size=4, window=3).sum().backward()
        assert device.clocks.waits == before


@pytest.mark.parametrize("owner", [(CopyHandle, "wait"), (HostChunks, "settle")], ids=lambda owner: owner[1])
def test_the_orderings_are_needed(monkeypatch: pytest.MonkeyPatch, owner: tuple[type, str]) -> None:
    monkeypatch.setattr(*owner, lambda *_: None)
    with pytest.raises(OrderError), simulated_device():
        _layer([tensor.to("cuda").requires_grad_() for tensor in _weights()], True).square().sum().backward()
