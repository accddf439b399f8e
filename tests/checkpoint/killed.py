"""Kills processes in the middle of saves.

:func:`main` runs in a process of its own, because it forks and kills: children start from imported modules instead of
importing torch again.
"""

import contextlib
import io
import os
import random
import signal
import time
import traceback
from pathlib import Path

import torch

from deepspeed import comm
from deepspeed.checkpoint.directory import find
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.logging import logger
from tests.checkpoint.faults import faults
from tests.checkpoint.training import engine, fragments, joined, offload, other_state, train
from tests.checkpoint.whole import read_whole
from tests.harness import assert_states_equal
from tests.parallel.pipe.support import engine_of

TAGS = (None, "same")


def value_in(folder: Path) -> float | None:
    """What the newest checkpoint holds, after a check of every byte; None if there is none."""
    if not (folder / "latest").exists():  # the first save has not come so far, or has been stopped before it
        return None
    found = find(folder, None)
    if found is None:
        return None
    with CheckpointReader(found.folder) as reader:
        for record in reader.manifest.files:
            reader.read_file(record.name)
        value = read_whole(reader, next(iter(reader.parameters))).flatten()[0].item()
        for name in reader.parameters:
            values = read_whole(reader, name)
            # One save wrote all of it: nothing of another save is mixed in.
            assert bool((values == value).all()), (name, value, values)
        return value


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


def made(pipes: bool):
    """An engine of copies, or of a pipeline over all ranks."""
    return engine_of(comm.get_world_size(), 1, 2) if pipes else engine(2, "fp32")


def train_and_save(folder: Path, rank: int, meeting: Path, tag: str | None, first: float, pipes: bool) -> None:
    """A rank of a job that saves until it is killed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    comm.init_distributed("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, verbose=False)
    assert comm.get_world_size() == 2
    run = made(pipes)
    value = first
    while True:
        fill(run, value)
        with contextlib.suppress(OSError):
            (folder / f"started{rank}").touch()
        run.save_checkpoint(folder, tag=tag)
        value += 1


def moments(folder: Path, count: int, pipes: bool) -> None:
    """Kills one of two ranks at random moments of saves; ``pipes``: they are the stages of a pipeline."""
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
                    train_and_save(here, rank, folder / f"meeting{number}", tag, before + 1, pipes)
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
    if pipes:
        comm.init_distributed("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1, verbose=False)
    run = made(pipes)
    for tag in TAGS:
        here = folder / str(tag)
        fill(run, 9999)
        run.save_checkpoint(here, tag=tag)
        assert value_in(here) == 9999
        left = [path.name for path in here.iterdir() if path.name.startswith(".")]
        assert not left, left


def train_rank(folder: Path, cell: str, rank: int, meeting: Path, resumes: bool) -> None:
    """Trains five steps with a checkpoint after the third, or the last two from that checkpoint."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    comm.init_distributed("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, verbose=False)
    assert comm.get_world_size() == 2
    stage, precision, states, parameters = cell.split(",")
    sections = offload(int(stage), states, parameters, str(folder / "files"))
    run = engine(int(stage), precision, seed=8 if resumes else 3, dropout=0.1, zero_optimization=sections)
    if resumes:
        run.load_checkpoint(folder / "saved")
    else:
        torch.manual_seed(rank)  # dropout differs by rank, so each rank needs its own random state back
        train(run, range(3))
        run.save_checkpoint(folder / "saved")
    losses = train(run, range(3, 5))
    path = folder / f"{'resumed' if resumes else 'straight'}{rank}"
    torch.save((losses, fragments(run), other_state(run)), f"{path}.part")
    os.rename(f"{path}.part", path)
    if resumes:
        run.destroy()
        return
    while True:  # until it is killed
        train(run, range(5, 6))


def runs(folder: Path, cells: list[str]) -> None:
    """Kills training jobs, continues from their checkpoints, and compares with what they did before they died."""
    for cell in cells:
        here = folder / cell
        here.mkdir(parents=True)
        for resumes in (False, True):
            children = []
            for rank in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        train_rank(here, cell, rank, here / f"meeting{resumes}", resumes)
                        os._exit(0)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(3)
                children.append(child)
            deadline = time.monotonic() + 60
            while not resumes and not all((here / f"straight{rank}").exists() for rank in range(2)):
                assert time.monotonic() < deadline and not any(os.waitpid(c, os.WNOHANG)[0] for c in children), cell
                time.sleep(0.005)
            for child in children:
                if resumes:
                    assert not wait(child)
                else:  # the second may end by itself before its turn, since the first has left it
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
        straight, resumed = (
            [torch.load(here / f"{kind}{rank}", weights_only=False) for rank in range(2)]
            for kind in ("straight", "resumed")
        )
        for before, after in zip(straight, resumed, strict=True):
            assert after[0] == before[0], (cell, before[0], after[0])
            assert_states_equal(after[2], before[2])
        assert_states_equal(joined([rank[1] for rank in resumed]), joined([rank[1] for rank in straight]))
        if (here / "files").exists():
            assert not list((here / "files").iterdir()), "the files of the killed run are still there"
        print(f"cell {cell}", flush=True)


def main(place: str, what: str, *more: str) -> str:
    """Runs ``operations TAG ACT``, ``moments COUNT [pipeline]`` or ``runs CELL ...``; returns what it printed.

    A cell is ``stage,precision,tier of the optimizer's states,tier of the parameters``.
    """
    logger.setLevel("ERROR")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    folder, printed = Path(place), io.StringIO()
    with contextlib.redirect_stdout(printed):
        if what == "operations":
            operations(folder, more[0] or None, more[1])
        elif what == "runs":
            runs(folder, list(more))
        else:
            moments(folder, int(more[0]), pipes="pipeline" in more)
    return printed.getvalue()
