"""A process that has imported torch and the package, and forks into a worker whenever it is asked to.

A worker that is forked is there after some milliseconds; one that imports everything itself costs seconds of processor
time, for every rank and for every run that wants new processes. The server itself runs nothing but imports, so a worker
finds what a fresh interpreter finds after the same imports: no threads, no group, no random numbers drawn.

Hashes of strings, and with them the order of sets, are equal in all workers of one server. The pool therefore has two
servers and takes its ranks from both in turn: ranks that depend on such an order still disagree.

Where several processes of pytest share the tests, they share the servers too: each connects to the two that the process
above them has started (:func:`start_shared`), and gets a fork of each for itself.
"""

from __future__ import annotations

import atexit
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
START_SHARED = "from tests.harness import fork_server; fork_server.main_shared()"
SHARED = "TESTS_FORK_SERVERS"  # environment: addresses of the shared servers
LENGTH = 4  # bytes that say how long a message is


class ForkServer:
    """Client of a fork server, in the process that requests workers.

    Args:
        modules: Names of modules that the server imports beside torch and the package, so that no worker has to.
        shared: Address of a server that is shared; None starts one.

    Attributes:
        is_closed: Whether the server has been ended. What it has forked has ended with it.
        shared: See above.
    """

    is_closed = False

    def __init__(self, modules: Sequence[str] = (), shared: str | None = None) -> None:
        self.shared = shared
        self._process: subprocess.Popen[bytes] | None = None
        if shared is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = _start(START, str(theirs.fileno()), pass_fds=(theirs.fileno(),))
        else:
            ours = socket.socket(socket.AF_UNIX)
            ours.connect(shared)
        ours.settimeout(START_LIMIT)
        self._channel = ours
        self._pid: int | None = None  # known as soon as the server answers
        self._pid = self._process.pid if self._process is not None else self.ask({"modules": []})
        if modules:
            self.ask({"modules": list(modules)})

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
            code = self._process and self._process.poll()
            raise RuntimeError(f"the server that forks workers does not answer; its exit code: {code}") from error
        finally:
            if not is_answered:
                self.close()
        return answer

    def close(self) -> None:
        """Ends the server, and on Linux what it has forked."""
        self.is_closed = True
        self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class ForkedProcess:
    """A worker, with the part of ``subprocess.Popen`` that the pool uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
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


def _start(program: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    environ = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, pass_fds=pass_fds)


def start_shared(folder: Path, modules: Sequence[str] = ()) -> None:
    """Starts two servers that processes below this one find by the environment. They end with this process.

    Does so on Linux only: elsewhere a server would not notice that this process has been killed.

    Args:
        folder: For their sockets.
        modules: As in :class:`ForkServer`. Imported once here, they need not be imported for each process below.
    """
    if sys.platform != "linux":
        return
    addresses = [str(folder / name) for name in ("first", "second")]
    for address in addresses:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)  # here, so that processes may connect before the server has imported anything
        listener.listen()
        with listener:
            process = _start(START_SHARED, str(listener.fileno()), *modules, pass_fds=(listener.fileno(),))
        atexit.register(process.kill)
    os.environ[SHARED] = os.pathsep.join(addresses)


def shared_addresses() -> list[str]:
    """Returns the addresses of the servers that a process above this one has started; empty if there is none."""
    given = os.environ.get(SHARED)
    return given.split(os.pathsep) if given else []


def main_shared() -> None:
    """Forks a server for each process that connects. A forked child returns from here into a worker."""
    listener = socket.socket(fileno=int(sys.argv.pop(1)))
    modules, sys.argv[1:] = sys.argv[1:], []
    _prepare()
    _import(modules)
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers
    while True:
        channel, _ = listener.accept()
        if os.fork() == 0:
            break
        channel.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from tests.harness import worker

    worker.die_with_parent(parent)
    _serve(channel)


def main() -> None:
    """Serves requests until the client ends. A forked child returns from here into the worker."""
    channel = socket.socket(fileno=int(sys.argv.pop(1)))  # ranks are of one run: their command lines must be alike
    _prepare()
    _serve(channel)


def _prepare() -> None:
    """Imports what workers need; these modules stay loaded."""
    from tests.harness import worker

    worker.die_with_parent()
    worker.explain_assertions()
    gc.disable()
    _import_much()


def _serve(channel: socket.socket) -> None:
    """Serves requests. A forked child returns from here into the worker."""
    from tests.harness import worker

    server = os.getpid()
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        try:
            question, descriptors = _receive(channel)
        except (EOFError, ConnectionResetError):
            return
        if "modules" in question:
            _import(question["modules"])
            _send(channel, server)
            continue
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


def _import_much() -> None:
    """Imports what nearly every rank needs.

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
    torch.set_num_threads(1)
    _check_threads()


def _import(modules: Sequence[str]) -> None:
    """Imports these modules.

    Raises:
        RuntimeError: An import has started a thread.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    _check_threads()


def _check_threads() -> None:
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) > 1:
        raise RuntimeError("importing the package has started a thread: workers cannot be forked")
