"""Files of offloaded states: whose they are, when they go, what failures say, and that all views of them agree."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator import host_memory
from deepspeed.errors import OffloadError
from deepspeed.offload import file_io, run_directory
from deepspeed.offload.file_io import BlockFile, IoSettings
from deepspeed.offload.files import CachePolicy, FileMemory, FileSettings
from deepspeed.offload.pinned import PAGE, page_buffer, round_to_pages
from deepspeed.offload.run_directory import RunDirectory, remove_leftovers
from deepspeed.offload.streams import CopyStream
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from tests.harness import run_ranks
from tests.harness.errors import RanksFailed
from tests.offload.training import config, make_engine, train, train_some

OFFLOADED = torch.device("cpu")


def test_what_fits_beside_others_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 500)
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 800)
    kept = CachePolicy(None, is_trained=False, ranks=1)
    assert kept.choose(400) == (True, "400 bytes on this host, 500 of its memory are free")
    assert kept.choose(401) == (False, "401 bytes on this host, 500 of its memory are free")
    assert not CachePolicy(None, is_trained=False, ranks=2).choose(201)[0], "each rank of the host has as much"
    assert CachePolicy(None, is_trained=False, ranks=2).choose(200)[0]
    assert not CachePolicy(None, is_trained=True, ranks=1).choose(1)[0]
    assert CachePolicy(True, is_trained=True, ranks=1).choose(10**9) == (True, "offload_param.page_cache is true")
    assert not CachePolicy(False, is_trained=False, ranks=1).choose(1)[0]


def memory_in(folder: Path, cache: CachePolicy, memory_tracker: MemoryTracker) -> FileMemory:
    settings = FileSettings(str(folder), "parameters", 0, IoSettings(), pin=False, cache=cache)
    memory = FileMemory(OFFLOADED, settings, buffer_count=2, buffer_bytes=lambda _: 4096, up=CopyStream(OFFLOADED))
    memory.open([(300, 4), (100, 4)], memory_tracker)
    return memory


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_cached_file_needs_no_buffers(is_trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_tracker = MemoryTracker()
    memory = memory_in(tmp_path, CachePolicy(True, is_trained), memory_tracker)
    monkeypatch.setattr(BlockFile, "read", None)
    monkeypatch.setattr(BlockFile, "write", None)
    first, second = memory.empty(300, torch.float32, "first"), memory.empty(100, torch.float32, "second")
    assert memory_tracker.live(StorageKind.STAGING, Tier.HOST) == 0 and memory.lends is not is_trained
    values = torch.arange(300.0)
    memory.write(first, values)
    memory.write(second[7:9], torch.tensor([1.0, 2.0]))
    memory.settle()
    memory.announce(first)
    target = torch.empty(300)
    memory.read(first, target).wait()
    assert torch.equal(target, values) and second.sum() == 3
    before = first.data_ptr(), first._version
    memory.read(first, first).wait()
    assert (first.data_ptr(), first._version) == before, "nothing moves"
    on_disk = memory.file.path.read_bytes()
    assert torch.equal(torch.frombuffer(bytearray(on_disk[:1200]), dtype=torch.float32), values)
    memory.close()
    assert not list(tmp_path.iterdir())


CPU = torch.device("cpu")


def open_memory(folder: Path, tensors: list[tuple[int, int]], *, buffers: int = 2, pages: int = 2) -> FileMemory:
    settings = FileSettings(str(folder), "test", 0, IoSettings(block_size=PAGE, queue_depth=3), pin=False)
    memory = FileMemory(CPU, settings, buffer_count=buffers, buffer_bytes=lambda _: pages * PAGE, up=CopyStream(CPU))
    memory.open(tensors, MemoryTracker())
    return memory


# -- directories -------------------------------------------------------------------------------------------------------


def test_what_a_container_of_this_machine_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_host", lambda: "pod_1")
    process, left = start_owner(tmp_path, "os.kill(os.getpid(), 9)")
    process.wait()
    other_boot = tmp_path / left.name.replace(run_directory._boot(), "another0boot")
    other_boot.mkdir()
    (tmp_path / f"{other_boot.name}.lock").touch()
    monkeypatch.setattr(run_directory, "_host", lambda: "pod_2")
    remove_leftovers(tmp_path)
    assert not left.exists(), "of the same kernel, by another host name"
    assert other_boot.exists(), "of another machine, whose locks may not reach this one"


@pytest.mark.parametrize("planted", ["file", "locked", "directory", "link", "fifo"])
def test_nothing_that_lies_in_the_folder_blocks_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(run_directory, "_numbers", iter(range(5)))
    target = tmp_path / "target"
    target.write_text("kept")
    name = f"{run_directory._PREFIX}-{run_directory._host()}-{run_directory._boot()}-{os.getpid()}-rank0-states"
    lock = tmp_path / f"{name}-0.lock"
    handle = -1
    if planted == "directory":
        lock.mkdir()
    elif planted == "link":
        lock.symlink_to(target)
    elif planted == "fifo":
        os.mkfifo(lock)
    else:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT)
        if planted == "locked":
            fcntl.flock(handle, fcntl.LOCK_EX)
    made = RunDirectory(tmp_path, rank=0, purpose="states")
    assert made.path.name == (f"{name}-0" if planted == "file" else f"{name}-1")
    made.remove()
    assert target.read_text() == "kept"
    if handle != -1:
        os.close(handle)


def test_two_runs_never_share_and_both_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (RunDirectory("new/place", rank=0, purpose="states") for _ in range(2))
    assert first.path != second.path and first.path.is_absolute() and first.path.is_dir() and second.path.is_dir()
    (first.path / "file").write_bytes(b"x")
    first.remove()
    first.remove()
    assert not first.path.exists() and second.path.is_dir()
    remove_leftovers(tmp_path / "new/place")
    assert second.path.is_dir(), "its owner is alive"
    second.remove()
    third = RunDirectory("new/place", rank=0, purpose="states")
    assert third.path.is_dir()
    del third  # of an engine that nobody destroyed
    assert not list((tmp_path / "new/place").iterdir())


_OWNER = """
import os, sys, time
sys.path.insert(0, {root!r})
from deepspeed.offload.run_directory import RunDirectory
directory = RunDirectory({folder!r}, rank=3, purpose="states")
(directory.path / "data").write_bytes(b"x" * 100)
print(directory.path, flush=True)
{then}
"""


def start_owner(folder: Path, then: str) -> tuple[subprocess.Popen[str], Path]:
    root = str(Path(__file__).parents[2])
    program = textwrap.dedent(_OWNER).format(root=root, folder=str(folder), then=then)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_directory_goes_at_exit_and_after_a_crash(tmp_path: Path) -> None:
    process, path = start_owner(tmp_path, "sys.exit(3)")
    assert process.wait(60) == 3 and not list(tmp_path.iterdir())
    process, path = start_owner(tmp_path, "time.sleep(600)")
    mine = RunDirectory(tmp_path, rank=0, purpose="states")
    assert path.is_dir(), "its owner is alive"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert path.is_dir()
    other = RunDirectory(tmp_path, rank=0, purpose="states")
    assert not path.exists() and mine.path.is_dir()
    mine.remove()
    other.remove()
    assert not list(tmp_path.iterdir())


def test_unusable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="nvme_path .*file"):
        RunDirectory(tmp_path / "file", rank=0, purpose="states")


# -- tensors in files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_all_views_agree(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    sizes = [5000, 64, 3000]
    memory = open_memory(tmp_path, [(numel, 4) for numel in sizes])
    assert memory.file.is_direct is direct or not direct
    assert memory.file.size == sum(round_to_pages(4 * numel) for numel in sizes)
    tensors = [memory.empty(numel, torch.float32, "a tensor") for numel in sizes]
    assert memory.file.size == sum(round_to_pages(4 * numel) for numel in sizes), "reserved exactly"
    small = tensors[1]
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        expected = torch.zeros_like(tensor)
        assert torch.equal(tensor, expected)
        for start, stop in ((0, tensor.numel()), (64, 128), (0, 64), (1024, 3000)):
            start, stop = min(start, tensor.numel()), min(stop, tensor.numel())
            values = torch.rand(stop - start, generator=generator)
            expected[start:stop] = values
            memory.write(tensor[start:stop], values)  # directly, or through the mapping where pages are shared
            memory.settle()
            assert torch.equal(tensor, expected)
        if tensor is small:
            target = torch.empty_like(tensor)
            memory.read(tensor, target).wait()
            assert torch.equal(target, expected)
            tensor.mul_(2)  # a user writes through the mapping
            memory.announce(tensor)
            memory.read(tensor, target).wait()
            assert torch.equal(target, 2 * expected)
    memory.close()
    memory.close()
    assert not list(tmp_path.iterdir())
    assert float(small.sum()) > 0, "a mapping outlives its file"


def test_announced_reads_notice_writes(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, [(1024, 4), (1024, 4), (1024, 4)])
    tensors = [memory.empty(1024, torch.float32, "a tensor") for _ in range(3)]
    for number, tensor in enumerate(tensors):
        memory.announce(tensor)  # the third finds no buffer
        memory.write(tensor, torch.full_like(tensor, number + 1))
        memory.announce(tensor)
    target = torch.empty(1024)
    for number, tensor in reversed(list(enumerate(tensors))):
        memory.read(tensor, target).wait()
        assert bool((target == number + 1).all())
    memory.announce(tensors[0])
    memory.forget()
    tensors[0].fill_(7)
    memory.read(tensors[0], target).wait()
    assert bool((target == 7).all())
    memory.close()


def test_first_values_are_written_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is loaded into a new engine writes to the mapping right after the state was made."""

    class Slow:
        def __getattr__(self, name: str) -> Any:
            if name == "pwritev":
                time.sleep(0.05)
            return getattr(os, name)

    memory = open_memory(tmp_path, [(3 * PAGE // 4, 4)])
    tensor = memory.empty(3 * PAGE // 4, torch.float32, "x")
    monkeypatch.setattr(file_io, "os", Slow())
    memory.initialize(tensor, 0.0)
    tensor.fill_(7.0)
    memory.settle()
    assert bool((tensor == 7.0).all())
    memory.close()


def test_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some let a file be opened so and refuse its use."""
    file = BlockFile(tmp_path / "f", IoSettings())
    file.grow(PAGE)
    direct = file._direct
    real = os.pwritev

    def refuse(handle: int, buffers: Any, offset: int) -> int:
        if handle == direct:
            raise OSError(errno.EINVAL, "no")
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    buffer = page_buffer(PAGE, pin=False).fill_(5)
    file.write(buffer, 0).wait()
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes([5]) * PAGE


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_transfers_continue(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(os, call)

    def a_page(handle: int, buffers: list[memoryview], offset: int) -> int:
        return int(real(handle, [buffers[0][:PAGE]], offset))

    monkeypatch.setattr(os, call, a_page)
    file = BlockFile(tmp_path / "f", IoSettings())
    file.grow(3 * PAGE)
    written, found = (page_buffer(3 * PAGE, pin=False) for _ in range(2))
    written.copy_(torch.arange(3).repeat_interleave(PAGE))
    file.write(written, 0).wait()
    file.read(found, 0).wait()
    file.close()
    assert torch.equal(found, written)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_lack_of_space_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "free_bytes", lambda path: 1000)
    with pytest.raises(OffloadError, match=rf"{tmp_path}.*expected .* free bytes, found 1,000"):
        open_memory(tmp_path, [(5000, 4)])


@pytest.mark.parametrize(("number", "words"), [(errno.EIO, "failed"), (errno.ENOSPC, "full.*needed.*free")])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_failing_disk_is_named(
    call: str, number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory(tmp_path, [(1024, 4)])
    tensor = memory.empty(1024, torch.float32, "a tensor")

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OffloadError, match=f"{tmp_path}.*{words}"):
        memory.write(tensor, torch.ones(1024))
        memory.settle()
        memory.read(tensor, torch.empty(1024))
    monkeypatch.undo()
    memory.close()


def one_rank_lacks_space(settings: dict[str, Any]) -> None:
    real = file_io.free_bytes
    if dist.get_rank() == 1:
        file_io.free_bytes = lambda path: 10
    try:
        make_engine(settings)
    finally:
        file_io.free_bytes = real


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_rank_lacks_space, 2, config(2, offload_optimizer=section))
    text = str(caught.value)
    assert "free bytes, found 10" in text and "could not be made on rank(s) [1]" in text


def test_buffer_too_small_is_named(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_size": 64}
    with pytest.raises(RanksFailed, match="offload_param.buffer_size"):
        run_ranks(train, 1, config(3, offload_param=section))


def failing_in_the_middle(settings: dict[str, Any]) -> None:
    """A write fails once in an update; the disk recovers and the files go."""
    engine = make_engine(settings)
    train_some(engine, range(1))
    real, calls = os.pwritev, []

    def fail_third(*arguments: Any) -> int:
        calls.append(0)
        if len(calls) == 3:
            raise OSError(errno.EIO, "broken")
        return real(*arguments)

    os.pwritev = fail_third
    try:
        with pytest.raises(OffloadError, match=r"optimizer\.bin.*broken"):
            train_some(engine, range(1, 2))
    finally:
        os.pwritev = real
    engine.destroy()


@pytest.mark.parametrize("pipelined", [False, True])
def test_failure_during_an_update(pipelined: bool, tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "pipeline_read": pipelined, "pipeline_write": pipelined}
    run_ranks(failing_in_the_middle, 1, config(2, offload_optimizer=section))
    assert not list(tmp_path.iterdir())


def test_staging_is_counted(tmp_path: Path) -> None:
    memory_tracker = MemoryTracker()
    settings = FileSettings(str(tmp_path), "test", 0, IoSettings(), pin=False)
    memory = FileMemory(CPU, settings, buffer_count=3, buffer_bytes=lambda _: 5000, up=CopyStream(CPU))
    memory.open([(10, 4)], memory_tracker)
    assert memory_tracker.live(StorageKind.STAGING, Tier.HOST) == memory.staging_bytes == 3 * 2 * PAGE
    memory.close()
