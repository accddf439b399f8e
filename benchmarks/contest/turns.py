"""Contestants whose processes stay alive and compute once at each request, so that they can take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


class Contestant:
    """The processes of one contestant, one per rank.

    Each runs ``SCRIPT --work NAME SHAPE RANK RENDEZVOUS``: it computes once for each line of standard input and
    prints a JSON list of figures (see :func:`requests`); other lines that it prints are skipped.

    Args:
        script: The benchmark.
        name: Of the contestant.
        shape: Sizes, sent to the processes as JSON.
        ranks: Number of processes.
        folder: Temporary folder for the rendezvous and the log.
        python: Interpreter of the processes.
    """

    def __init__(
        self, script: str, name: str, shape: dict[str, int], ranks: int, folder: str, python: str = sys.executable
    ) -> None:
        from deepspeed.ports import free_port  # not above: a contestant may import this file beside another deepspeed

        self._name = name
        self._log = f"{folder}/{name}.log"
        common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
        self._processes = []
        for rank in range(ranks):
            variables = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with open(self._log, "a") as log:
                process = subprocess.Popen(
                    [python, script, "--work", name, json.dumps(shape), str(rank), f"{folder}/{name}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **variables},
                )
            self._processes.append(process)

    def turn(self) -> list[list[Any]]:
        """Makes all processes compute once; returns the figures of each.

        Raises:
            SystemExit: A process has ended; the message has the end of the contestant's log.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> list[Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[") and line.rstrip().endswith("]") and line[1].isdigit():
                answer: list[Any] = json.loads(line)
                return answer
        with open(self._log) as log:
            sys.exit(f"{self._name}: a process ended\n{log.read()[-2000:]}")

    def end(self) -> None:
        """Ends the processes and waits for them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def requests() -> Iterator[None]:
    """Yields at each request, until standard input ends; for a process of a contestant."""
    for _ in sys.stdin:
        yield


def answer(*figures: Any) -> None:
    """Prints the figures of one request, of which the first is a number; for a process of a contestant."""
    print(json.dumps(figures), flush=True)
