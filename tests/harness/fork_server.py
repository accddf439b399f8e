"""A process that has imported torch and the package, and forks into a worker whenever it is asked to.

A worker that is forked is there after some milliseconds; one that imports everything itself costs seconds of processor
time, for every rank and for every run that wants new processes. The server itself runs nothing but imports, so a worker
finds what a fresh interpreter finds after the same imports: no threads, no group, no random numbers drawn.

Hashes of strings, and with them the order of sets, are equal in all workers of one server. The pool therefore has two
servers and takes its ranks from both in turn: ranks that depend on such an order still disagree.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 180.0  # seconds until the server has imported torch, on a busy machine
START = "from tests.harness import fork_server; fork_server.main()"
LENGTH = 4  # bytes that say how long a message is


class ForkServer:
    """The end of the process that asks.

    Args:
        modules: Names of modules that the server imports beside torch and the package, so that no worker has to.

    Attributes:
        is_closed: Whether the server has been ended. What it has forked has ended with it.
    """

    is_closed = False

    def __init__(self, modules: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        environ = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(START_LIMIT)
        self._channel = ours

    def fork(self, environ: Mapping[str, str], output: int, connection: int, stacks: int) -> ForkedProcess:
        """Starts a worker with these file descriptors.

        Raises:
            RuntimeError: The server has ended.
        """
        return ForkedProcess(self, self.ask({"environ": dict(environ)}, (output, connection, stacks)))

    def ask(self, question: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        """Sends a question and returns the answer.

        An exception in between closes the server, also one that a signal's handler raises (a test's time limit): the
        next answer in the channel might belong to this question, or the server wait for the rest of it.

        Raises:
            RuntimeError: The server has ended or does not answer.
        """
        is_answered = False
        try:
            _send(self._channel, question, descriptors)
            answer = _receive(self._channel)[0]
            is_answered = True
        except (OSError, EOFError) as error:
            code = self._process.poll()
            raise RuntimeError(f"the server that forks workers does not answer; its exit code: {code}") from error
        finally:
            if not is_answered:
                self.close()
        return answer

    def close(self) -> None:
        """Ends the server, and on Linux what it has forked."""
        self.is_closed = True
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A worker, with the part of ``subprocess.Popen`` that the pool uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._server.is_closed:
            with contextlib.suppress(ProcessLookupError):  # it ends with its server, at once only on Linux
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL
        if self.returncode is None:
            self.returncode = self._server.ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        """Sends a signal unless it has ended. Its number stays its own until :meth:`poll`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _send(channel: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(channel, [len(data).to_bytes(LENGTH, "little")], descriptors)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH, 3)
    if len(head) < LENGTH:
        raise EOFError
    data = b""
    while len(data) < int.from_bytes(head, "little"):
        more = channel.recv(65536)
        if not more:
            raise EOFError
        data += more
    return json.loads(data), descriptors


def main() -> None:
    """Answers until the asking process ends. A forked child returns from here into the worker."""
    from tests.harness import worker

    # Ranks are of one run: their command lines must be alike.
    (_, descriptor, *modules), sys.argv[1:] = sys.argv, []
    channel = socket.socket(fileno=int(descriptor))
    worker.die_with_parent()
    worker.explain_assertions()
    gc.disable()  # nothing of what is imported is ever freed
    _import_much(modules)
    server = os.getpid()
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        try:
            question, descriptors = _receive(channel)
        except (EOFError, ConnectionResetError):
            return
        if "pid" in question:
            pid, status = os.waitpid(question["pid"], os.WNOHANG)
            _send(channel, os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, pid)
    channel.close()
    worker.die_with_parent(server)
    output, connection, stacks = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(question["environ"])
    worker.serve(connection, stacks)


def _import_much(modules: Sequence[str]) -> None:
    """Imports what nearly every rank needs, and these modules.

    Raises:
        RuntimeError: An import has started a thread, which a fork would lose.
    """
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401 - torch's optimizers import it when the first one is made

    import deepspeed.engine.initialize  # noqa: F401
    import tests.harness.state  # noqa: F401
    from deepspeed.config import parse

    parse({"train_batch_size": 1, "optimizer": {"type": "AdamW"}}, dp_world_size=1)  # pydantic makes its schemas here
    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) > 1:
        raise RuntimeError("importing the package has started a thread: workers cannot be forked")
