"""Runs ranks on links of a chosen speed: network namespaces joined by a bridge, whose traffic the kernel shapes.

Needs Linux, root, ``ip`` and ``tc``. Elsewhere :func:`throttle_transport` slows the transport of this project down, but
not torch's DDP.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from deepspeed.ports import free_port

_RESULT = "RESULT "
_NETWORK = "10.77.0"


def can_shape() -> str | None:
    """Returns why links cannot be shaped here; None: they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    probe = subprocess.run(["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return probe.stderr.strip()
    subprocess.run(["ip", "netns", "del", f"probe{os.getpid()}"], check=True)
    return None


@contextmanager
def namespaces(ranks: int, megabits: float | None) -> Iterator[list[str]]:
    """Creates a network namespace per rank with the interface ``eth0``, and yields their names.

    Args:
        ranks: Number of ranks.
        megabits: Mbit/s of each direction of each link; None: not shaped.
    """
    tag = f"b{os.getpid()}"
    hub, names = f"{tag}hub", [f"{tag}r{rank}" for rank in range(ranks)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            _run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if megabits is not None:
                for inside, device in ((name, "eth0"), (hub, port)):
                    rate = f"{int(megabits * 1000)}kbit"
                    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
                    _run("ip", "netns", "exec", inside, "tc", "qdisc", "add", "dev", device, *shape)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run_ranks(command: Sequence[str], ranks: int, spaces: Sequence[str] = ()) -> list[Any]:
    """Runs a Python command line once per rank, and returns by rank what it gave to :func:`print_result`, or None.

    Args:
        command: Script, or ``-m`` and a module below ``benchmarks``, with its arguments.
        ranks: Number of ranks.
        spaces: Network namespace of each rank; empty: all run in that of this process.

    Raises:
        RuntimeError: A rank failed; with the end of what it printed.
    """
    common: dict[str, Any] = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": f"{_NETWORK}.1" if spaces else "127.0.0.1", "MASTER_PORT": free_port(),
        "PYTHONPATH": Path(__file__).resolve().parents[1],
        **({"GLOO_SOCKET_IFNAME": "eth0"} if spaces else {}),
    }  # fmt: skip
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        started = []
        for rank, output in enumerate(outputs):
            words = [*(("ip", "netns", "exec", spaces[rank]) if spaces else ()), sys.executable, *command]
            variables = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            started.append(subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, **variables}))
            stack.callback(started[-1].kill)
        results = []
        for process, output in zip(started, outputs, strict=True):
            process.wait()
            output.seek(0)
            text = output.read()
            if process.returncode:
                raise RuntimeError(f"a rank ended with {process.returncode}:\n{text[-4000:]}")
            lines = [line.removeprefix(_RESULT) for line in text.splitlines() if line.startswith(_RESULT)]
            results.append(json.loads(lines[0]) if lines else None)
    return results


def print_result(result: Any) -> None:
    """Prints the result of this rank, which :func:`run_ranks` returns."""
    print(_RESULT + json.dumps(result), flush=True)


def sent_bytes() -> int:
    """Returns the bytes that this process's namespace has sent through ``eth0``, headers included; 0 without one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def throttle_transport(megabits: float) -> None:
    """Delays this process's waits on gloo transports, as a link of ``megabits`` Mbit/s would delay its sends."""
    from deepspeed.comm.host.gloo import GlooTransport

    rate, free_at = megabits * 1e6 / 8, 0.0
    send, guard = GlooTransport.send, GlooTransport.guard

    def slow_send(self: Any, tensor: Any, peer: int, key: int) -> Any:
        nonlocal free_at
        free_at = max(free_at, time.perf_counter()) + tensor.numel() * tensor.element_size() / rate
        return send(self, tensor, peer, key)

    def slow_guard(self: Any, *arguments: Any) -> None:
        due = free_at
        guard(self, *arguments)
        time.sleep(max(0.0, due - time.perf_counter()))

    GlooTransport.send, GlooTransport.guard = slow_send, slow_guard  # type: ignore[method-assign]


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
