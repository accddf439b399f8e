"""Files through the page cache: when, and that mappings are used where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed.accelerator import host_memory
from deepspeed.offload.file_io import BlockFile, IoSettings
from deepspeed.offload.files import FileMemory, FileSettings
from deepspeed.offload.page_cache import CachePolicy
from deepspeed.offload.streams import CopyStream
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind

CPU = torch.device("cpu")


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
    memory = FileMemory(CPU, settings, buffer_count=2, buffer_bytes=lambda _: 4096, up=CopyStream(CPU))
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
