"""A program does not end while threads of gloo have tensors of it in their hands."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepspeed.comm.watch import drain_at_exit
from deepspeed.comm.watch.drain_at_exit import wait_for_gloo_threads

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no state there")

BUSY = bytes(1 << 27)  # what takes a thread a tenth of a second or more, without the interpreter


def _named() -> None:
    """Gives the calling thread the name of those that run gloo's collectives."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")


def test_returns_when_the_last_has_come_to_rest(monkeypatch):
    texts: list[str] = []
    started, end = threading.Event(), threading.Event()

    def work() -> None:
        _named()
        started.set()
        hashlib.sha256(BUSY)
        texts.append("done")
        texts.append("was told to end" if end.wait(60) else "was waited for")

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    wait_for_gloo_threads()
    assert texts == ["done"]
    monkeypatch.setattr(drain_at_exit, "_PATIENCE", 600.0)
    wait_for_gloo_threads()  # it waits for something else now
    end.set()
    thread.join()
    assert texts == ["done", "was told to end"]


PROGRAM = """
import hashlib, os, threading
import torch.distributed as dist
from deepspeed.comm.job.job import Job
from tests.comm.watch.test_drain_at_exit import BUSY, _named

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Job.current().watched.begin()
begun = threading.Event()

def work():
    _named()
    begun.set()
    hashlib.sha256(BUSY)
    os.write(1, b"at rest")

threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_a_program_waits_for_it_at_its_end():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "at rest"), ended.stderr
