"""Runs contestants in turns: all are alive, one computes, the others sleep in a read.

Steps come in blocks. A round is one block of every contestant, in a new random order, so that other load of the machine
affects all alike. Ratios are taken between times of the same round.
"""

from __future__ import annotations

import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from contest.contestants import Contestant
from contest.workloads import Workload

_BENCHMARKS = Path(__file__).resolve().parents[1]
_SPARE_MIB = 1500  # with less free memory, a further contestant could make the machine swap


class ContestantFailed(RuntimeError):
    """A contestant could not be built, or has ended; the message has the end of its log."""


@dataclass
class Result:
    """The measurements of one contestant. The seconds of a step are those of its slowest rank."""

    name: str
    versions: dict[str, Any] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)  # seconds of the timed steps of each round
    losses: list[float] = field(default_factory=list)  # mean over ranks, every step since the start
    bytes_per_step: float | None = None  # payload received, sum over ranks
    cpu_seconds: list[float] = field(default_factory=list)  # per round: of one step, all threads, busiest rank
    page_faults: list[float] = field(default_factory=list)  # per round: minor ones of one step, highest of the ranks
    memory: dict[str, float] = field(default_factory=dict)  # MiB, highest of the ranks
    idle_share: float = 0.0  # processor time while paused / time paused, highest of the ranks
    failure: str | None = None

    @property
    def median(self) -> float:
        """Returns the median seconds of all timed steps."""
        return statistics.median(seconds for block in self.rounds for seconds in block)

    @property
    def fastest(self) -> float:
        """Returns the seconds of the fastest timed step, the one that other load disturbed least."""
        return min(seconds for block in self.rounds for seconds in block)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Returns the first and the third quartile of the seconds of all timed steps."""
        lower, _, upper = statistics.quantiles(
            [seconds for block in self.rounds for seconds in block], n=4, method="inclusive"
        )
        return lower, upper


class _Rank:
    """One worker process with a thread that reads its answers."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, folder: Path) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=folder,  # not the repository: a peer must not find our package there
                text=True,
                bufsize=1,
            )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put({"error": f"process ended with code {self._process.wait()}"})

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its reader thread puts the error into ``answers``

    def stop(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Team:
    """All ranks of one contestant."""

    def __init__(self, contestant: Contestant, workload: Workload, python: str, folder: Path) -> None:
        self.name = contestant.name
        self._ranks = []
        for rank in range(workload.world_size):
            paths = [str(_BENCHMARKS)] if contestant.peer else [str(_BENCHMARKS), str(_BENCHMARKS.parent)]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(workload.world_size),
                "LOCAL_WORLD_SIZE": str(workload.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "CUDA_VISIBLE_DEVICES": "",
            }
            if contestant.peer:
                environment["DS_ACCELERATOR"] = "cpu"
                environment["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
            rendezvous = str(folder / f"{contestant.name}.rendezvous")
            command = [python, "-m", "contest.worker", contestant.name, workload.name, str(rank), rendezvous]
            log = folder / f"{contestant.name}-{rank}.log"
            self._ranks.append(_Rank(command, environment, log, folder))

    def collect(self, seconds: float) -> list[dict[str, Any]]:
        """Returns one answer per rank. Raises as soon as one rank fails, since the others may wait for it forever."""
        deadline = time.monotonic() + seconds
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._ranks):
            for index, rank in enumerate(self._ranks):
                if index in answers:
                    continue
                try:
                    answers[index] = rank.answers.get(timeout=0.05 if len(self._ranks) > 1 else 1.0)
                except queue.Empty:
                    continue
                if "error" in answers[index]:
                    raise ContestantFailed(self._describe(index, answers[index]["error"]))
            if time.monotonic() > deadline:
                raise ContestantFailed(self._describe(0, f"no answer within {seconds:.0f} s"))
        return [answers[index] for index in range(len(self._ranks))]

    def ask(self, command: dict[str, Any], seconds: float = 300) -> list[dict[str, Any]]:
        """Sends a command to every rank and returns the answers."""
        for rank in self._ranks:
            rank.send(command)
        return self.collect(seconds)

    def _describe(self, index: int, error: str) -> str:
        tail = self._ranks[index].log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"{self.name}, rank {index}: {error}", *tail])

    def stop(self) -> None:
        for rank in self._ranks:
            rank.stop()


class Arena:
    """Starts the contestants of one workload and runs rounds; a context manager that ends their processes.

    Args:
        workload: The model with its data.
        contestants: Those that train. One that fails drops out; its result says why.
        peer_python: Interpreter of the environment with the published package.
        report_progress: Called with a line of text at each block.
    """

    def __init__(
        self,
        workload: Workload,
        contestants: list[Contestant],
        *,
        peer_python: str | None,
        report_progress: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._contestants = contestants
        self._peer_python = peer_python
        self._report_progress = report_progress
        self._folder = tempfile.TemporaryDirectory(prefix="zero-benchmark-")
        self._teams: dict[str, _Team] = {}
        self._idle: dict[str, list[list[tuple[float, float]]]] = {}
        self._received: dict[str, list[float]] = {}
        self.results = {contestant.name: Result(contestant.name) for contestant in contestants}

    def __enter__(self) -> Arena:
        for contestant in self._contestants:
            self._report_progress(f"starting {contestant.name}")
            with self._dropping_out(contestant.name):
                self._enter(contestant)
        return self

    def __exit__(self, *exception: object) -> None:
        for team in self._teams.values():
            team.stop()
        self._folder.cleanup()

    @contextmanager
    def _dropping_out(self, name: str) -> Iterator[None]:
        """Ends a contestant that fails inside and writes the failure into its result; the others continue."""
        try:
            yield
        except ContestantFailed as error:
            self._report_progress(f"{name} failed and drops out")
            self.results[name].failure = str(error)
            if name in self._teams:
                self._teams.pop(name).stop()

    def _enter(self, contestant: Contestant) -> None:
        spare = psutil.virtual_memory().available / 2**20
        if spare < _SPARE_MIB:
            raise ContestantFailed(
                f"{contestant.name} not started: needs {_SPARE_MIB} MiB of free memory, found {spare:.0f}; "
                "enter fewer at a time with --only"
            )
        python = self._peer_python if contestant.peer else sys.executable
        assert python is not None, "zero.py enters peers with --peer-python only"
        team = _Team(contestant, self._workload, python, Path(self._folder.name))
        self._teams[contestant.name] = team
        versions = team.collect(600)[0]
        package = versions.pop("deepspeed_from")
        is_ours = package is not None and Path(package).resolve().is_relative_to(_BENCHMARKS.parent)
        if package is not None and is_ours == contestant.peer:
            raise ContestantFailed(f"{contestant.name} imported deepspeed from {package}, which is the wrong one")
        # One step now: it allocates buffers, which the check above must see for the next contestant.
        self._block(contestant.name, 1, timed=False)
        self.results[contestant.name].versions = versions

    def run_rounds(self, *, rounds: int, steps: int, warmup: int, seed: int = 0) -> None:
        """Runs warm-up steps of every contestant, then ``rounds`` rounds of ``steps`` timed steps each.

        The first step of each block is run but not timed: it finds the caches full of the previous contestant's data.
        """
        for name in list(self._teams):
            self._report_progress(f"warming {name} up")
            with self._dropping_out(name):
                self._block(name, warmup, timed=False)
                self._teams[name].ask({"do": "forget_peak"})
        shuffle = random.Random(seed)
        for index in range(rounds):
            order = list(self._teams)
            shuffle.shuffle(order)
            for name in order:
                self._report_progress(f"round {index + 1} of {rounds}: {name}")
                with self._dropping_out(name):
                    self._block(name, steps + 1, timed=True)
        for name in list(self._teams):
            with self._dropping_out(name):
                self._finish(name)

    def profile(self, name: str, steps: int) -> dict[str, Any]:
        """Returns the profiles of rank 0 of a contestant, as texts."""
        return self._teams[name].ask({"do": "profile", "count": steps})[0]

    def _block(self, name: str, count: int, *, timed: bool) -> None:
        answers = self._teams[name].ask({"do": "steps", "count": count})
        result = self.results[name]
        result.losses += [statistics.fmean(losses) for losses in zip(*(a["losses"] for a in answers), strict=True)]
        if not timed:
            return
        slowest = [max(seconds) for seconds in zip(*(a["seconds"] for a in answers), strict=True)]
        result.rounds.append(slowest[1:])
        result.cpu_seconds.append(max(a["cpu_seconds"] for a in answers) / count)
        result.page_faults.append(max(a["page_faults"] for a in answers) / count)
        if all(a["bytes_received"] is not None for a in answers):
            self._received.setdefault(name, []).append(sum(a["bytes_received"] for a in answers) / count)
        if all(a["idle"] is not None for a in answers):
            shares = [(a["idle"]["cpu_seconds"], a["idle"]["seconds"]) for a in answers]
            self._idle.setdefault(name, []).append(shares)

    def _finish(self, name: str) -> None:
        """Adds memory, traffic and the idle share to the result of a contestant."""
        result = self.results[name]
        answers = self._teams[name].ask({"do": "memory"})
        result.memory = {key: max(a[key] for a in answers) for key in answers[0]}
        if received := self._received.get(name):
            result.bytes_per_step = statistics.median(received)
        for rank in zip(*self._idle.get(name, []), strict=True):
            paused = sum(seconds for _, seconds in rank)
            result.idle_share = max(result.idle_share, sum(cpu for cpu, _ in rank) / paused if paused else 0.0)
