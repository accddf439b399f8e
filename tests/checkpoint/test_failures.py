"""A save that fails anywhere leaves every earlier checkpoint as it was, and every rank raises the same error."""

import contextlib
import resource
import signal
from pathlib import Path

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint.directory import find, tags
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.errors import CheckpointError
from tests.checkpoint.faults import faults
from tests.checkpoint.training import engine, train
from tests.checkpoint.whole import read_whole
from tests.harness import run_ranks


def left_over(folder: str) -> list[str]:
    return [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


def gain_in(folder: str) -> tuple[str, float]:
    """Which checkpoint is the newest, and a value in it, after a check of every byte."""
    found = find(Path(folder), None)
    assert found is not None
    with CheckpointReader(found.folder) as reader:
        for record in reader.manifest.files:
            reader.read_file(record.name)
        return found.tag, read_whole(reader, "gain").item()


def set_gain(run, value: float) -> None:
    with torch.no_grad():
        run.module.gain.fill_(value)


def fail_everywhere(folder: str, failing_rank: int, tag: str | None):
    """Lets each file operation of one rank fail in turn; the operations that were tried."""
    run = engine(1, "fp32")
    set_gain(run, 1.0)
    run.save_checkpoint(folder, tag="good" if tag is None else tag)
    rank = comm.get_rank()
    tried: list[str] = []
    number = 0
    while True:
        run.global_steps += 1
        set_gain(run, 2.0 + number)
        with faults(number if rank == failing_rank else None) as counting:
            before = gain_in(folder)
            message = None
            try:
                run.save_checkpoint(folder, tag=tag)
            except CheckpointError as error:
                message = str(error)
        messages: list = [None] * comm.get_world_size()
        comm.all_gather_object(messages, message)
        assert len(set(messages)) == 1
        if message is None:
            break
        if rank == failing_rank:
            tried.append(counting.names[number])
        after = gain_in(folder)
        # Once the new one has its name it is whole, even if `latest` could not be moved any more.
        assert after == before or after[1] == 2.0 + number, (number, counting.names[number])
        assert "No space left" in message and f"rank {failing_rank}" in message
        comm.barrier()
        number += 1
    comm.barrier()
    assert gain_in(folder)[1] == 2.0 + number
    assert not left_over(folder)
    loaded = engine(1, "fp32", seed=8)
    loaded.load_checkpoint(folder)
    assert loaded.module.gain.item() == 2.0 + number
    return tried


@pytest.mark.parametrize("tag", [None, "same"], ids=["new-tag", "same-tag"])
def test_each_operation_may_fail(tag, tmp_path):
    first, second = run_ranks(fail_everywhere, 2, str(tmp_path / "0"), 0, tag, timeout=150)
    assert {"open", "write", "fsync", "rename", "replace", "makedirs"} <= set(first)
    assert len(first) > 40 and not second
    _, second = run_ranks(fail_everywhere, 2, str(tmp_path / "1"), 1, tag, timeout=150)
    assert {"open", "write", "fsync"} <= set(second) and len(second) > 10


def full_disk(folder: str):
    """A limit on the size of files, as root cannot override it, on one rank."""
    run = engine(2, "fp32")
    run.save_checkpoint(folder, tag="good")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if comm.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(CheckpointError) as raised:
            run.save_checkpoint(folder, tag="bad")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    comm.barrier()
    return str(raised.value), gain_in(folder)[0], left_over(folder), list(tags(Path(folder)))


def test_full_disk(tmp_path):
    first, second = run_ranks(full_disk, 2, str(tmp_path))
    assert first == second
    assert "failed on rank 1" in first[0] and ".safetensors: File too large; a limit on the size of files" in first[0]
    assert first[1:] == ("good", [], ["good"])


def unwritable(folder: str):
    run = engine(2, "fp32")
    with pytest.raises(CheckpointError) as raised:
        run.save_checkpoint(folder)
    return str(raised.value)


def test_folder_that_cannot_be_made(tmp_path):
    """Below a file nobody can make a folder, not even root."""
    (tmp_path / "file").write_text("")
    first, second = run_ranks(unwritable, 2, str(tmp_path / "file" / "checkpoints"))
    assert first == second
    assert "failed on rank 0" in first and "Not a directory" in first


def different_tags(folder: str, validation: str):
    run = engine(0, "fp32", checkpoint={"tag_validation": validation})
    with contextlib.suppress(CheckpointError):
        run.save_checkpoint(folder, tag=f"tag{comm.get_rank()}")
    return sorted(tags(Path(folder)))


@pytest.mark.parametrize(("validation", "saved"), [("Ignore", ["tag0"]), ("Warn", ["tag0"]), ("Fail", [])])
def test_tags_are_compared(validation, saved, tmp_path):
    assert run_ranks(different_tags, 2, str(tmp_path), validation) == [saved, saved]


def save_many(folder: str, keep: int):
    run = engine(1, "fp32", checkpoint={"keep_last": keep})
    (Path(folder) / "other" / "global_step1").mkdir(parents=True, exist_ok=True)
    (Path(folder) / "other" / "latest").write_text("global_step1")
    for step in range(4):
        train(run, range(step, step + 1))
        run.save_checkpoint(folder)
        comm.barrier()
    return list(tags(Path(folder)))


def test_keep_last_removes_the_oldest(tmp_path):
    assert run_ranks(save_many, 2, str(tmp_path), 2) == [["global_step3", "global_step4"]] * 2
    assert (tmp_path / "other" / "global_step1").is_dir()


def foreign_files(folder: str):
    run = engine(0, "fp32")
    run.save_checkpoint(folder, tag="again")
    (Path(folder) / "again" / "notes.txt").write_text("mine")
    run.save_checkpoint(folder, tag="again")
    return (Path(folder) / "again" / "notes.txt").read_text()


def test_saving_again_keeps_what_others_put_there(tmp_path):
    assert run_ranks(foreign_files, 1, str(tmp_path)) == ["mine"]


class FailingState:
    """A loader or a schedule whose state cannot be read on rank 1."""

    def state_dict(self) -> dict:
        if comm.get_rank() == 1:
            raise ValueError("no state here")
        return {}


def save_with_failing_state(folder: str, owner: str) -> str:
    run = engine(1, "fp32")
    setattr(run, owner, FailingState())
    with pytest.raises(CheckpointError) as raised:
        run.save_checkpoint(folder)
    return str(raised.value)


@pytest.mark.parametrize("owner", ["training_dataloader", "lr_scheduler"])
def test_state_that_fails_on_one_rank_is_an_error_on_all(owner, tmp_path):
    messages = run_ranks(save_with_failing_state, 2, str(tmp_path), owner)
    assert len(set(messages)) == 1 and "failed on rank 1: ValueError: no state here" in messages[0]
