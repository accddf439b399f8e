"""One rank of one contestant: builds it, then runs steps whenever the arena requests it and sleeps in a read otherwise.

Started as ``python -m contest.worker CONTESTANT WORKLOAD RANK RENDEZVOUS`` by :mod:`contest.arena`. Commands arrive as
JSON lines on standard input and are answered by JSON lines on what was standard output at the start; whatever a library
prints goes to standard error instead, so that it cannot garble an answer. The end of standard input ends the process.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import resource
import socket
import struct
import sys
import time
import traceback
from typing import Any

_TCP_INFO_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info of linux/tcp.h


def tcp_bytes_received() -> int | None:
    """Payload bytes received on all open TCP sockets of this process; None where the system does not report them."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except FileNotFoundError:
            continue  # the descriptor of the directory listing itself
        if len(info) >= _TCP_INFO_RECEIVED + 8:
            total += struct.unpack_from("=Q", info, _TCP_INFO_RECEIVED)[0]
    return total


def _status_mib(key: str) -> float:
    """A memory line of /proc/self/status in MiB."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no line {key}; memory can be measured on Linux only")


def _forget_peak() -> None:
    """Sets the kernel's peak of resident memory back to what is resident now."""
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


class Worker:
    """Holds the step function and answers commands; each public method is one command."""

    def __init__(self, contestant: str, workload: str, rank: int, rendezvous: str) -> None:
        import torch

        torch.set_num_threads(1)
        from contest.contestants import CONTESTANTS, join_group
        from contest.workloads import workload_named

        self._rank = rank
        self._workload = workload_named(workload)
        self._imported_mib = _status_mib("VmRSS")
        join_group(self._workload, rank, rendezvous)
        self._step = CONTESTANTS[contestant].build(self._workload)
        self._done = 0
        self._cpu_when_paused: float | None = None
        self._paused_at = 0.0
        self._whole_life_peak = 0.0

    def hello(self) -> dict[str, Any]:
        """Versions, so that the report can prove which package ran."""
        import torch

        package = sys.modules.get("deepspeed")
        return {
            "torch": torch.__version__,
            "deepspeed": getattr(package, "__version__", None),
            "deepspeed_from": getattr(package, "__file__", None),
            "imported_mib": self._imported_mib,
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Runs ``count`` steps; times, losses, traffic, processor time running and paused, page faults."""
        idle = None
        if self._cpu_when_paused is not None:
            paused = time.perf_counter() - self._paused_at
            idle = {"cpu_seconds": time.process_time() - self._cpu_when_paused, "seconds": paused}
        batches = [self._workload.draw(self._rank, self._done + index) for index in range(count)]
        before = tcp_bytes_received()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_start = time.process_time()
        seconds, losses = [], []
        for batch in batches:
            start = time.perf_counter()
            losses.append(self._step(batch))
            seconds.append(time.perf_counter() - start)
        cpu_seconds = time.process_time() - cpu_start
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - usage.ru_minflt
        after = tcp_bytes_received()
        self._done += count
        self._cpu_when_paused, self._paused_at = time.process_time(), time.perf_counter()
        return {
            "seconds": seconds,
            "losses": losses,
            "bytes_received": None if before is None or after is None else after - before,
            "cpu_seconds": cpu_seconds,
            "page_faults": faults,
            "idle": idle,
        }

    def forget_peak(self) -> dict[str, Any]:
        """Ends the warm-up: from here on the peak is that of steady training."""
        self._whole_life_peak = _status_mib("VmHWM")
        _forget_peak()
        return {}

    def memory(self) -> dict[str, Any]:
        """Resident MiB of this process: after imports, highest ever, highest in steady training."""
        steady = _status_mib("VmHWM")
        return {
            "imported_mib": self._imported_mib,
            "peak_mib": max(self._whole_life_peak, steady),
            "steady_peak_mib": steady,
        }

    def profile(self, count: int) -> dict[str, Any]:
        """Profiles ``count`` steps twice: operators (torch.profiler) and Python functions (cProfile); both as text."""
        import torch

        batches = [self._workload.draw(self._rank, self._done + index) for index in range(2 * count)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
            for batch in batches[:count]:
                self._step(batch)
        functions = cProfile.Profile()
        functions.enable()
        for batch in batches[count:]:
            self._step(batch)
        functions.disable()
        self._done += 2 * count
        text = io.StringIO()
        pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(45)
        table = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=70)
        return {"operators": table, "functions": text.getvalue(), "steps": count}


def main() -> None:
    """Answers commands until standard input ends."""
    contestant, workload, rank, rendezvous = sys.argv[1:5]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")

    try:
        worker = Worker(contestant, workload, int(rank), rendezvous)
        answer(worker.hello())
        for line in sys.stdin:
            command = json.loads(line)
            answer(getattr(worker, command.pop("do"))(**command))
    except BaseException as error:  # the arena must learn of it whatever it is; the traceback stays in our log
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # a peer rank may be gone already: interpreter shutdown could wait for it


if __name__ == "__main__":
    main()
