"""A transfer that cannot start and one that cannot end raise the same error: from the wait, worded by the watchdog."""

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import start_p2p
from deepspeed.comm.watch import watched_group
from deepspeed.comm.watch.watched_group import _abort, wait_for_gloo_threads
from deepspeed.errors import CommunicationError
from tests.harness import on_ranks


@on_ranks(2)
def test_a_gather_over_connections_that_are_closed() -> None:
    transport = Job.adopt().connector.over(dist.group.WORLD, None)
    flat = torch.ones(2 << 16)
    transport.all_gather(flat, key=transport.next_move(), label="the first").wait()
    watched = Job.adopt().watched.of()
    assert watched is not None
    transport.watch._patience = 0.0
    if dist.get_rank() == 1:
        _abort(watched)
    time.sleep(0.2)
    works = [transport.all_gather(flat, key=transport.next_move(), label=f"number {i}") for i in range(3)]
    with pytest.raises(CommunicationError) as raised:
        works[0].wait()
    time.sleep(0.2)
    text = str(raised.value)
    assert text.startswith("waiting for number 0 failed; a peer has probably died or timed out"), text


def _fails(*_given: object) -> None:
    raise RuntimeError("Connection closed by peer")


def test_a_transfer_that_cannot_begin():
    transfer = start_p2p(_fails, torch.ones(1), 1, 0)
    assert not transfer.is_completed()
    with pytest.raises(RuntimeError, match="closed by peer"):
        transfer.wait(1.0)


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no state there")

BUSY = bytes(1 << 27)  # what takes a thread a tenth of a second or more, without the interpreter


def _named() -> None:
    """Gives the calling thread the name of those that run gloo's collectives."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")


def test_returns_when_the_last_thread_is_idle(monkeypatch):
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
    monkeypatch.setattr(watched_group, "_PATIENCE", 600.0)
    wait_for_gloo_threads()  # it waits for something else now
    end.set()
    thread.join()
    assert texts == ["done", "was told to end"]


PROGRAM = """
import hashlib, os, threading
import torch.distributed as dist
from deepspeed.comm.job.job import Job
from tests.comm.watch.test_watched_group import BUSY, _named

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Job.adopt().watched.begin()
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
