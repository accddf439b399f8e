"""Saving runs at the speed of the disk and needs next to no memory; loading reads what it needs."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from tests.harness import run_ranks

MIB = 1 << 20


def large_engine(blocks: int, stage: int = 1):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(blocks)))
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4 * 1024 * 1025},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    }
    run = deepspeed.initialize(model=model, config=config)[0]
    run.backward(run(torch.ones(1, 1024, dtype=torch.bfloat16)).float().mean())
    run.step()
    return run


def plain_write(path: Path, sizes: list[int], block: bytes) -> float:
    """Seconds to write and sync files of these sizes, one after the other."""
    start = time.perf_counter()
    for number, size in enumerate(sizes):
        descriptor = os.open(path.with_name(f"plain{number}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        left = size
        while left:
            left -= os.write(descriptor, block[: min(left, len(block))])
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def save_and_write(folder: str, blocks: int, rounds: int):
    run = large_engine(blocks)
    block = os.urandom(4 * MIB)
    ours, plain, grown = [], [], []
    for number in range(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        run.save_checkpoint(folder, tag="tag")
        ours.append(time.perf_counter() - start)
        grown.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
        sizes = [path.stat().st_size for path in (Path(folder) / "tag").iterdir()]
        plain.append(plain_write(Path(folder) / "plain", sizes, block))
        shutil.rmtree(Path(folder) / "tag")
        del number
    return ours, plain, grown, sum(sizes)


@pytest.mark.slow
def test_saving_is_as_fast_as_writing(tmp_path):
    """The best of several interleaved rounds, because other programs use the disk too."""
    (result,) = run_ranks(save_and_write, 1, str(tmp_path), 48, 8, timeout=280, fresh=True)
    ours, plain, grown, total = result
    assert total > 570 * MIB
    assert min(plain) / min(ours) > 0.9, (
        f"saving {total / min(ours) / 1e9:.2f} GB/s, writing {total / min(plain) / 1e9:.2f}"
    )
    assert max(grown) < 64 * MIB  # one bucket has 16 MiB of masters


def memory_of_a_save(folder: str):
    run = large_engine(16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.save_checkpoint(folder)
    after_save = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.load_checkpoint(folder)
    after_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after_save - before) * 1024, (after_load - after_save) * 1024


def test_memory_of_saving_and_loading(tmp_path):
    """200 MB of masters and states; neither way holds them a second time."""
    ((saving, loading),) = run_ranks(memory_of_a_save, 1, str(tmp_path), fresh=True)
    assert saving < 48 * MIB, f"{saving / MIB:.0f} MiB"
    assert loading < 48 * MIB, f"{loading / MIB:.0f} MiB"
