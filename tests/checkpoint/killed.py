"""Kills processes in the middle of saves.

``python -m tests.checkpoint.killed FOLDER operations TAG ACT`` or ``... FOLDER moments COUNT``.

Run in a process of its own, because it forks: children start from imported modules instead of importing torch again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from deepspeed import comm
from deepspeed.checkpoint.directory import find
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.logging import logger
from tests.checkpoint.faults import faults
from tests.checkpoint.training import engine

TAGS = (None, "same")


def value_in(folder: Path) -> float | None:
    """What the newest checkpoint holds, after a check of every byte; None if there is none."""
    found = find(folder, None)
    if found is None:
        return None
    with CheckpointReader(found.folder) as reader:
        for record in reader.manifest.files:
            reader.read_file(record.name)
        gain = reader.read_full("gain").item()
        for name in reader.parameters:
            values = reader.read_full(name)
            # One save wrote all of it: nothing of another save is mixed in.
            assert bool((values == gain).all()), (name, gain, values)
        return gain


def fill(run, value: float) -> None:
    run.global_steps = int(value)
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.fill_(value)


def wait(child: int) -> bool:
    """Whether the child was killed (otherwise it ended well)."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def operations(folder: Path, tag: str | None, act: str) -> None:
    """Dies before, after or in the middle of every file operation of a save in turn."""
    run = engine(0, "fp32")
    fill(run, 1)
    run.save_checkpoint(folder, tag=tag)
    value, kills = 1.0, 0
    while True:
        fill(run, value + 1)
        child = os.fork()
        if child == 0:
            with faults(kills, act):
                run.save_checkpoint(folder, tag=tag)
            os._exit(0)
        if not wait(child):
            break
        found = value_in(folder)
        assert found in (value, value + 1), (kills, found, value)
        value = found
        kills += 1
    assert value_in(folder) == value + 1
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not left, left
    print(f"{kills} deaths survived", flush=True)


def train_and_save(folder: Path, rank: int, meeting: Path, tag: str | None, first: float) -> None:
    """A rank of a job that saves until it is killed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    comm.init_distributed("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, verbose=False)
    run = engine(2, "fp32")
    value = first
    while True:
        fill(run, value)
        with contextlib.suppress(OSError):
            (folder / f"started{rank}").touch()
        run.save_checkpoint(folder, tag=tag)
        value += 1


def moments(folder: Path, count: int) -> None:
    """Kills one of two ranks at random moments of saves."""
    dice = random.Random(0)
    value = 0.0
    for number in range(count):
        tag = TAGS[number % 2]
        here = folder / str(tag)
        here.mkdir(parents=True, exist_ok=True)
        before = value_in(here) or 0.0
        for rank in range(2):
            with contextlib.suppress(FileNotFoundError):
                (here / f"started{rank}").unlink()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    train_and_save(here, rank, folder / f"meeting{number}", tag, before + 1)
                finally:
                    os._exit(3)
            children.append(child)
        while not all((here / f"started{rank}").exists() for rank in range(2)):
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, 0.15))
        os.kill(children[dice.randrange(2)], signal.SIGKILL)
        time.sleep(0.02)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        value = value_in(here) or 0.0
        assert value >= before, (number, before, value)
        print(f"moment {number}: {before:g} -> {value:g}", flush=True)
    run = engine(2, "fp32")
    for tag in TAGS:
        here = folder / str(tag)
        fill(run, 9999)
        run.save_checkpoint(here, tag=tag)
        assert value_in(here) == 9999
        left = [path.name for path in here.iterdir() if path.name.startswith(".")]
        assert not left, left


def main() -> None:
    logger.setLevel("ERROR")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    folder = Path(sys.argv[1])
    if sys.argv[2] == "operations":
        operations(folder, sys.argv[3] or None, sys.argv[4])
    else:
        moments(folder, int(sys.argv[3]))
    print("all survived", flush=True)


if __name__ == "__main__":
    main()
