"""A worker process: waits for calls, runs each as one rank of a fresh process group, reports, cleans up.

Forked by a server (``tests.harness.fork_server``), or started as ``python -m tests.harness.worker CONNECTION_FD
STACKS_FD`` where a run needs an interpreter of its own; never by hand. Its stdout and stderr are a file that the pool
reads.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

DUMP_STACKS = signal.SIGUSR1


@dataclass(frozen=True)
class Call:
    """One rank's part of a run. ``payload`` is the pickled ``(function, args, kwargs)``."""

    payload: bytes
    rank: int
    world_size: int
    timeout: float
    rendezvous: str
    port: int
    backend: str | None
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """How a call failed. ``has_entered``: it had its process group, so the failure is the function's own."""

    summary: str
    traceback: str
    when: float
    skip_reason: str | None
    pickled: bytes | None
    has_entered: bool


def main() -> None:
    die_with_parent()
    explain_assertions()
    serve(int(sys.argv[1]), int(sys.argv[2]))


def serve(connection_descriptor: int, stacks_descriptor: int) -> None:
    """Executes calls until the pool ends this process."""
    connection = Connection(connection_descriptor)
    stacks = os.fdopen(stacks_descriptor, "w")
    faulthandler.enable(file=stacks)

    import torch

    from tests.harness.state import ProcessState

    torch.set_num_threads(1)
    state = ProcessState()
    state.restore()  # whatever it imports counts as starting up
    state.collect()
    connection.send(("hello", None))
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):
            return
        _dump_stacks_on_signal(stacks)
        kind, value = _run(call, state)
        connection.send((kind, value))
        # Destroying the group is what tells the peers of a failed rank. A rank that returned waits for the pool's word:
        # a peer may still connect to it in `new_group`, which ends without an exchange that would hold this rank there.
        if kind == "returned":
            try:
                connection.recv()
            except (EOFError, OSError):
                return
        _clean_up(state)
        connection.send(("ready", None))


def _dump_stacks_on_signal(stacks: TextIO) -> None:
    """Before every call: Lightning puts all signals back to what Python knows of them, which is not this handler."""
    faulthandler.unregister(DUMP_STACKS)
    faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)


def _run(call: Call, state: Any) -> tuple[str, Any]:
    from tests.harness import pickling

    has_entered = False
    try:
        function, args, kwargs = pickling.loads(call.payload)
        _enter(call, state)
        has_entered = True
        result = function(*args, **kwargs)
        return "returned", pickling.dumps(result)
    except BaseException as error:  # SystemExit and pytest's outcomes included: the rank reports, whatever it was
        return "raised", _describe(error, has_entered)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _enter(call: Call, state: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
    )
    os.environ.update(call.environ)
    state.seed()
    if call.backend is None:
        return
    if "nccl" in call.backend:
        torch.cuda.set_device(call.rank)
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.rendezvous}",
        rank=call.rank,
        world_size=call.world_size,
        # Above the run's own limit: the pool ends a run that hangs, with the stacks of all ranks.
        timeout=timedelta(seconds=call.timeout + 30),
    )
    # A rank that returns at once would otherwise take its connections down while a peer still makes them.
    dist.barrier()


def _clean_up(state: Any) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that failed to start leaves torch's count of groups, which names the next one, ahead of the peers'.
    dist.distributed_c10d._world.group_count = 0
    state.restore()
    state.collect()


def _describe(error: BaseException, has_entered: bool) -> Raised:
    from tests.harness import pickling

    when = time.monotonic()
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    text = "".join(traceback.format_exception(type(error), error, _test_frames(error)))
    skip = str(error) if type(error).__name__ == "Skipped" else None
    try:
        pickled = pickling.dumps(error)
        pickling.loads(pickled)  # many exceptions pickle but cannot be built again
    except (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError):
        pickled = None
    return Raised(summary, text, when, skip, pickled, has_entered)


def _test_frames(error: BaseException) -> Any:
    """Returns the traceback without the frames of this file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame or error.__traceback__


def explain_assertions() -> None:
    """Makes a failed ``assert`` in a test module show its values, as it does in pytest's own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent (given by number) dies, even while it waits in a collective."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1 or parent not in (None, os.getppid()):
            os._exit(1)


if __name__ == "__main__":
    # Calls are unpickled as instances of tests.harness.worker.Call, so run under that name and not as __main__.
    from tests.harness import worker

    worker.main()
