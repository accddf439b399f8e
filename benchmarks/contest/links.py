"""Ranks on links of a given speed: each in a network namespace of its own, joined by a bridge, shaped by the kernel.

Needs Linux, root, ``ip`` and ``tc``. Elsewhere :func:`throttle_transport` slows this project's own transport down;
torch's DDP cannot be slowed so, and is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NETWORK = "10.77.0"


def can_shape() -> str | None:
    """Returns None where links can be shaped, otherwise the reason."""
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
    """Names of namespaces, one per rank, whose interface ``eth0`` sends and receives so many megabits per second.

    Args:
        ranks: How many.
        megabits: Of each direction of each link; None: as fast as the machine copies.
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


def command(namespace: str, arguments: list[str]) -> list[str]:
    """Returns the command line that runs ``arguments`` in a namespace."""
    return ["ip", "netns", "exec", namespace, *arguments]


def environment(rank: int, ranks: int, port: int, *, shaped: bool) -> dict[str, str]:
    """Returns the environment variables of a rank."""
    summary: dict[str, Any] = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": f"{_NETWORK}.1" if shaped else "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    if shaped:
        summary["GLOO_SOCKET_IFNAME"] = "eth0"
    return {name: str(value) for name, value in summary.items()}


def sent_bytes() -> int:
    """Bytes that this process's namespace has sent through ``eth0`` so far, headers included; 0 without one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def throttle_transport(megabits: float) -> None:
    """Makes sends of this process's gloo transports arrive no sooner than a link of that speed would let them."""
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
