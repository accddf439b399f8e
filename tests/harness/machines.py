"""Several machines on this one: each has its own address, host name, processes and temporary folder.

A machine is a set of Linux namespaces (network, host name, mounts, processes). The folder of the test is the same on
all, as on a cluster with a shared file system; ``/tmp`` and ``/run`` are each machine's own. The machines reach each
other by name over a network that the test shapes and cuts (:mod:`tests.harness.network`), and nothing else: no packet
leaves this machine. Needs root, ``unshare`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

_ROOT = Path(__file__).parents[2]
_NETWORK = Path(__file__).with_name("network.py")
_PACKET = 9000  # bytes; as in the networks of clusters, and cheap for the program that moves them
_FORGOTTEN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TMPDIR",
)  # fmt: skip

needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or not shutil.which("unshare") or not shutil.which("ip"),
    reason="needs root, the programs unshare and ip, and /dev/net/tun",
)


class Machine:
    """One machine; made by :class:`Machines`.

    Attributes:
        name: Its host name, which the other machines resolve.
        address: Its IPv4 address.
        address6: Its IPv6 address.
        process: Number of its first process; with it all others end.
    """

    def __init__(self, name: str, number: int, process: int) -> None:
        self.name = name
        self.address = f"10.77.0.{number + 1}"
        self.address6 = f"fd77::{number + 1}"
        self.process = process

    def path(self, path: str) -> Path:
        """Returns where a file of the machine is found from outside."""
        return Path(f"/proc/{self.process}/root{path}")

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs ``words`` on the machine."""
        return ["nsenter", "-t", str(self.process), "-m", "-u", "-n", "-p", "--", *words]

    def start(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, **popen: object
    ) -> subprocess.Popen[str]:
        """Starts a program on the machine, in ``folder``."""
        environment = {name: value for name, value in os.environ.items() if name not in _FORGOTTEN}
        environment |= {"PYTHONPATH": str(_ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(variables or {})}
        words = ["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(self.command(words), env=environment, text=True, **{**pipes, **popen})

    def run(self, words: Sequence[str], folder: Path, timeout: float = 60, **more: object) -> tuple[int, str, str]:
        """Runs a program on the machine to its end: (exit code, stdout, stderr)."""
        return finish(self.start(words, folder, **more), timeout)

    def name_hosts(self, names: Sequence[tuple[str, str]]) -> None:
        """Changes which names the machine knows: pairs of address and name, in the order in which they count."""
        lines = [("127.0.0.1", "localhost"), *names]
        self.path("/tmp/hosts").write_text("".join(f"{address} {name}\n" for address, name in lines))

    def lose(self) -> None:
        """Ends all processes of the machine; cut its link before, or the others see their connections closed."""
        psutil.Process(self.process).kill()


def finish(process: subprocess.Popen[str], timeout: float) -> tuple[int, str, str]:
    """Waits for a program: (exit code, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()  # what it has started lives on, with its ends of the pipes, until the machine ends
        text = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise AssertionError(f"no end after {timeout} s\n{text.decode(errors='replace')[-9000:]}") from None
    return process.returncode, out, err


class Machines:
    """Machines and the network between them, until the end of the ``with`` block.

    Args:
        folder: Seen by all of them.
        count: How many; their names are ``node0``, ``node1``, ...
        megabits: Bandwidth of each link per second; 0: as much as the program moves.
        delay: Seconds of a packet on its way.
        loopback: Numbers of machines that resolve their own name to a loopback address, as Debian's installer sets it.
        unnamed: Numbers of machines that know no names of the others.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        megabits: float = 0.0,
        delay: float = 0.0,
        loopback: Sequence[int] = (),
        unnamed: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self._shape = {"megabits": megabits, "delay": delay}
        self._loopback, self._unnamed = loopback, unnamed
        self._stack = ExitStack()
        self.all: list[Machine] = []
        self._count = count

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            for number in range(self._count):
                self.all.append(self._start_machine(number, stack))
            machines = {one.name: [one.process, [one.address, one.address6]] for one in self.all}
            self._network = subprocess.Popen(
                ["unshare", "--net", sys.executable, str(_NETWORK), json.dumps({**self._shape, "machines": machines})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(self._stop_network)
            assert self._network.stdout is not None
            assert self._network.stdout.readline() == "ready\n"
            for number, one in enumerate(self.all):
                self._connect(number, one)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Machine:
        return self.all[number]

    def cut(self, number: int) -> None:
        """Lets no packet pass to or from a machine any more."""
        self._send_command(f"cut node{number}")

    def restore(self, number: int) -> None:
        """Undoes :meth:`cut`."""
        self._send_command(f"restore node{number}")

    def sent(self) -> list[int]:
        """Returns the bytes that each machine has sent to the others."""
        return list(self._send_command("bytes").values())

    def _send_command(self, line: str) -> dict[str, int]:
        assert self._network.stdin is not None and self._network.stdout is not None
        self._network.stdin.write(f"{line}\n")
        self._network.stdin.flush()
        return dict(json.loads(self._network.stdout.readline()))

    def _stop_network(self) -> None:
        assert self._network.stdin is not None and self._network.stdout is not None
        self._network.stdin.close()
        self._network.wait(20)
        self._network.stdout.close()

    def _start_machine(self, number: int, stack: ExitStack) -> Machine:
        script = f"""set -e
            mount --make-rprivate /
            hostname node{number}
            {_private_tmp([_ROOT, Path(sys.prefix), Path(sys.base_prefix), self.folder])}
            mount -t tmpfs tmpfs /run
            mkdir -p /run/sshd
            mount -t proc proc /proc
            ip link set lo up
            touch /tmp/up
            exec sleep 3600
        """
        words = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        process = subprocess.Popen(words)
        stack.callback(_end, process)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and process.poll() is None:
            for child in psutil.Process(process.pid).children():
                machine = Machine(f"node{number}", number, child.pid)
                if machine.path("/tmp/up").exists() and child.name() == "sleep":
                    return machine
            time.sleep(0.02)
        raise AssertionError(f"machine {number} did not come up")

    def _connect(self, number: int, one: Machine) -> None:
        device = f"wire{number}"
        others = [] if number in self._unnamed else [other for other in self.all if other is not one]
        names = [(other.address, other.name) for other in others]
        names.append(("127.0.1.1" if number in self._loopback else one.address, one.name))
        one.name_hosts(names)
        script = f"""set -e
            ip addr add {one.address}/24 dev {device}
            ip -6 addr add {one.address6}/64 dev {device} nodad
            ip link set {device} mtu {_PACKET} up
            touch /etc/hosts
            mount --bind /tmp/hosts /etc/hosts
        """
        subprocess.run(one.command(["sh", "-c", script]), check=True)


def _private_tmp(kept: Sequence[Path]) -> str:
    """Shell lines that give a machine a temporary folder of its own, in which only ``kept`` is that of this machine."""
    inside = sorted({path.resolve() for path in kept if path.resolve().is_relative_to("/tmp")})
    lines = ["mount --bind /tmp /mnt", "mount -t tmpfs -o mode=1777 tmpfs /tmp"]
    for path in inside:
        before = shlex.quote(f"/mnt/{path.relative_to('/tmp')}")
        lines += [f"mkdir -p {shlex.quote(str(path))}", f"mount --bind {before} {shlex.quote(str(path))}"]
    return "\n".join([*lines, "umount /mnt"])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # and with it the first process of the machine
    process.wait(20)
