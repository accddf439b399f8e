"""Jobs of forked ranks that may be killed, children of a new process of the pool: a rank starts in milliseconds."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import run_ranks

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class JobResult:
    """What a job has left.

    Attributes:
        losses: By step, of any process.
        lines: All lines of each process that came to the end of its program, by name.
        codes: Exit status of each process, by name; minus the signal's number.
        errors: What each process wrote to its stderr.
    """

    losses: dict[int, float]
    lines: dict[str, list[dict[str, Any]]]
    codes: dict[str, int]
    errors: dict[str, str]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """Those of the process that saw most."""
        ends = [lines[-1]["recoveries"] for lines in self.lines.values()]
        return max(ends, key=len)


def run_job(folder: Path, ranks: int, arguments: dict[str, Any], timeout: float = 200.0, **more: Any) -> JobResult:
    """Runs :func:`tests.elasticity.program.run` as ranks.

    Args:
        folder: For everything that is written.
        ranks: How many.
        arguments: Of the program.
        timeout: Seconds.
        **more: ``joins``: names of processes that join as soon as the run goes. ``replaces``: whether a process joins
            for each one that is killed.
    """
    env = {"DS_ACCELERATOR": "cpu"}
    run_ranks(main, 1, folder, ranks, arguments, backend=None, fresh=True, timeout=timeout, env=env, **more)
    codes = json.loads((folder / "codes.json").read_text())
    lines: dict[str, list[dict[str, Any]]] = {}
    losses: dict[int, float] = {}
    for name, code in codes.items():
        path = folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in found:
            if line.get("done") and line["loss"] is not None:  # a spare process has not seen that of its last step
                losses[line["step"]] = line["loss"]
        if code == 0 and found and found[-1].get("end"):
            lines[name] = found
    errors = {name: (folder / f"{name}.err").read_text() for name in codes}
    return JobResult(losses, lines, codes, errors)


def _start(name: str, folder: Path, arguments: dict[str, Any], environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        for number in (1, 2):
            os.dup2(os.open(folder / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        from tests.elasticity.program import run

        run(arguments, name, folder)
        code = 0
    except SystemExit as end:  # a spare process that was not needed
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class RunningJob:
    """The processes of a job that are running.

    Args:
        folder: For everything that they write.
        arguments: Of the program.
    """

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._running: dict[int, str] = {}
        self._codes: dict[str, int] = {}
        self._unreplaced = 0

    def start(self, name: str, environment: dict[str, str]) -> None:
        """Starts a process."""
        (self._folder / f"{name}.err").touch()
        self._running[_start(name, self._folder, self._arguments, environment)] = name

    def join(self, name: str, local_rank: int) -> None:
        """Starts a process that joins, once the address to join at is known."""
        while self._running and not (found := self._addresses()):
            time.sleep(0.02)
            self.reap(os.WNOHANG)
        if self._running:
            self.start(name, {"DEEPSPEED_ELASTIC_JOIN": found[-1], "LOCAL_RANK": str(local_rank)})

    def _addresses(self) -> list[str]:
        """The addresses to join at that living processes have printed, oldest first."""
        found = []
        for name in self._running.values():
            for line in (self._folder / f"{name}.err").read_text().splitlines():
                if (match := re.search(r"\[([\d: -]+)\] .*DEEPSPEED_ELASTIC_JOIN=(\S+)", line)) is not None:
                    found.append((match[1], match[2]))
        return [address for _, address in sorted(found)]

    def reap(self, options: int = 0) -> None:
        """Takes note of processes that have ended (without options: of all).

        To be replaced are those that were killed, or never joined since the member at which they knocked died.
        """
        while self._running:
            pid, status = os.waitpid(-1, options)
            if pid == 0:
                break
            name, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
            self._codes[name] = code
            self._unreplaced += code == -9 or (code != 0 and self._never_joined(name))
        (self._folder / "codes.json").write_text(json.dumps(self._codes))

    def _never_joined(self, name: str) -> bool:
        lines = self._folder / f"{name}.jsonl"
        return name.startswith("j") and (not lines.exists() or not lines.stat().st_size)

    def replace_killed(self, ranks: int) -> None:
        """Starts a process for each one that is killed, until none is running."""
        count = 0
        while self._running:
            self.reap(os.WNOHANG)
            while self._unreplaced:
                self._unreplaced -= 1
                self.join(f"j{count}", ranks + count)
                count += 1
            time.sleep(0.02)


def main(
    folder: Path, ranks: int, arguments: dict[str, Any], joins: Sequence[str] = (), replaces: bool = False
) -> None:
    """Runs a job in this process, which has been started for it."""
    import deepspeed.elasticity.feature  # noqa: F401 - once for all ranks
    import tests.elasticity.program  # noqa: F401
    from deepspeed.config import parse
    from deepspeed.ports import free_port

    parse(arguments["config"], dp_world_size=ranks)  # builds the schemas of its sections once for all ranks
    for name in PLACE:
        os.environ.pop(name, None)
    running = RunningJob(folder, arguments)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        running.start(f"r{rank}", {**common, **place})
    for number, name in enumerate(joins):
        running.join(name, ranks + number)
    if replaces:
        running.replace_killed(ranks)
    running.reap()
