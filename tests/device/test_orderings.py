"""The orderings that offloading and saving rest on: with each of them the program is ordered, without it is not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import save
from deepspeed.checkpoint.format import Manifest
from deepspeed.offload.files import FileMemory
from deepspeed.offload.host import HostMemory
from deepspeed.offload.pinned import page_buffer
from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from tests.device.support import batch, engine_at, evaluate, step
from tests.harness.device import OrderError, simulated_device
from tests.harness.device.accelerator import SimulatedAccelerator
from tests.harness.toy_models import tower

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
