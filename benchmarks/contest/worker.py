"""One rank of one contestant: builds it, then runs steps whenever the arena requests it and sleeps in a read otherwise.

:mod:`contest.arena` starts it as ``python -m contest.worker CONTESTANT WORKLOAD RANK RENDEZVOUS``. Commands arrive as
JSON lines on standard input. Answers are JSON lines on the original standard output; what libraries print goes to
standard error, so that it cannot mix with answers. The end of standard input ends the process.
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

from contest.process_memory import reset_peak, status_bytes

_TCP_INFO_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info of linux/tcp.h


def tcp_bytes_received() -> int | None:
    """Returns the payload bytes received on this process's open TCP sockets; None: the system does not report them."""
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


class Worker:
    """Holds the step function of a contestant; each public method answers one command."""

    def __init__(self, contestant: str, workload: str, rank: int, rendezvous: str) -> None:
        import torch

        torch.set_num_threads(1)
        from contest.contestants import CONTESTANTS, join_group
        from contest.workloads import workload_named

        self._rank = rank
        self._workload = workload_named(workload)
        self._imported_mib = status_bytes("VmRSS") / 2**20
        join_group(self._workload, rank, rendezvous)
        self._step = CONTESTANTS[contestant].build(self._workload)
        self._done = 0
        self._cpu_when_paused: float | None = None
        self._paused_at = 0.0
        self._warmup_peak_mib = 0.0

    def hello(self) -> dict[str, Any]:
        """Returns the versions and the file of the package that runs."""
        import torch

        package = sys.modules.get("deepspeed")
        return {
            "torch": torch.__version__,
            "deepspeed": getattr(package, "__version__", None),
            "deepspeed_from": getattr(package, "__file__", None),
            "imported_mib": self._imported_mib,
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Runs ``count`` steps; returns times, losses, traffic, processor time (running and paused), page faults."""
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
        self._warmup_peak_mib = status_bytes("VmHWM") / 2**20
        reset_peak()
        return {}

    def memory(self) -> dict[str, Any]:
        """Returns the resident MiB of this process: after imports, highest ever, highest in steady training."""
        steady = status_bytes("VmHWM") / 2**20
        return {
            "imported_mib": self._imported_mib,
            "peak_mib": max(self._warmup_peak_mib, steady),
            "steady_peak_mib": steady,
        }

    def profile(self, count: int) -> dict[str, Any]:
        """Profiles ``count`` steps by operator (torch.profiler) and as many by Python function; returns both texts."""
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
        return {"operators": table, "functions": text.getvalue()}


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
    except BaseException as error:  # the arena needs an answer to every command; the log has the traceback
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # an ordinary exit could wait for a rank that has ended already


if __name__ == "__main__":
    main()
