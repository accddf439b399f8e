"""What the settings of offload say is what happens: chunks, requests, threads, and where files are."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch

import deepspeed
from deepspeed.logging import logger
from deepspeed.offload import file_io
from deepspeed.offload.pinned import PAGE
from deepspeed.zero.placement import Tier
from tests.harness import on_ranks, run_ranks

WIDTH = 160  # a square of it is 6 and a bit chunks of 4096 elements


def make_engine(zero: dict[str, Any], **further: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2, **zero},
        **further,
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def chunks_of(device: str, folder: str, sub_group_size: int) -> tuple[list[int], torch.Tensor]:
    """Lengths of the chunks of one update, and the masters after two."""
    engine = make_engine(
        {"offload_optimizer": {"device": device, "nvme_path": folder}, "sub_group_size": sub_group_size}
    )
    strategy = engine.inspect().updater._chunks._strategies[{"cpu": Tier.HOST, "nvme": Tier.FILE}[device]]
    begin, lengths = strategy.begin, []

    def noted(chunks: Any) -> None:
        lengths[:] = [chunk.numel for chunk in chunks]
        begin(chunks)

    strategy.begin = noted
    step(engine)
    step(engine)
    masters = torch.cat([master.flat for master in engine._runtime.masters]).clone()
    engine.destroy()
    return lengths, masters


@on_ranks(2)
def test_sub_group_size_bounds_the_chunks(folder: str) -> None:
    for device in ("cpu", "nvme"):
        whole, expected = chunks_of(device, folder, 10**9)
        small, masters = chunks_of(device, folder, 5000)
        assert max(small) == 8192, "rounded up to whole pages"
        assert sum(small) == sum(whole) and len(small) > 2 * len(whole)
        assert torch.equal(masters, expected)


def requests(folder: str) -> None:
    """Sizes of requests, threads that serve them, and what is logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    sizes: set[int] = set()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            if name not in real:
                return getattr(os, name)

            def call(handle: int, views: list[Any], offset: int) -> int:
                sizes.add(sum(len(view) for view in views))
                return real[name](handle, views, offset)

            return call

    file_io.os = Noting()  # type: ignore[assignment]
    try:
        engine = make_engine(
            {"offload_optimizer": {"device": "nvme", "nvme_path": "swap/below"}},
            aio={"block_size": 3 * PAGE - 5, "queue_depth": 2, "intra_op_parallelism": 2},
        )
        step(engine)
        step(engine)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("deepspeed optimizer")]
        engine.destroy()
    finally:
        file_io.os = os
        logger.removeHandler(handler)
    assert max(sizes) == 3 * PAGE
    assert 1 <= len(threads) <= 4, "2 requests on each of 2 threads"
    place = str(Path("swap/below").absolute())
    named = [message for message in messages if place in message]
    rank = torch.distributed.get_rank()
    assert len(named) == (1 if rank == 0 else 0), messages


def in_folder(folder: str) -> None:
    os.chdir(folder)
    try:
        requests(folder)
    finally:
        os.chdir("/")


def test_requests_threads_and_place(tmp_path: Path) -> None:
    run_ranks(in_folder, 2, str(tmp_path), fresh=True)
    assert not list((tmp_path / "swap" / "below").iterdir())


@on_ranks(1)
def test_the_host_update_starts_no_threads() -> None:
    """The update of host memory runs on the threads that torch was given and on no others."""
    assert torch.get_num_threads() == 1
    engine = make_engine({"offload_optimizer": {"device": "cpu"}})
    step(engine)
    before = set(os.listdir("/proc/self/task"))
    step(engine)
    assert set(os.listdir("/proc/self/task")) == before
    engine.destroy()
