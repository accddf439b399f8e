"""Settings and report of a part of the GPU benchmark, and helpers to time steps and to run processes."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """Options of a part.

    Attributes:
        dry: Whether to run small sizes on the CPU, to test the program itself.
        peer_python: Python of an environment with the published ``deepspeed``; None: it is left out.
        nccl: Path of an NCCL library to load before torch's own; None: torch's own.
        jobs: Number of trainings of part B that share the GPU at once; they are not timed.
        cells: Regular expression; trainings of parts B, C and D run if it finds their names. In C and D a name is
            ``WHO on SHAPE``.
    """

    dry: bool
    peer_python: str | None = None
    nccl: str | None = None
    jobs: int = 1
    cells: str = ""

    @property
    def device(self) -> str:
        """Returns ``"cuda"``, or ``"cpu"`` in a dry run."""
        return "cpu" if self.dry else "cuda"

    def includes(self, name: str) -> bool:
        """Returns whether ``cells`` finds a training of that name."""
        return re.search(self.cells, name) is not None


@dataclass
class Table:
    """A table of results.

    Attributes:
        title: Title.
        columns: Names with units.
        rows: Text and numbers; None is shown as a dash.
        about: Explanation for the reader.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    about: str = ""


class Report:
    """The tables of one part, written to a file after every row, so that a stopped part leaves its rows.

    Several threads may add rows.
    """

    def __init__(self, path: Path, title: str) -> None:
        self._path = path
        self._title = title
        self._tables: list[Table] = []
        self._problems: list[str] = []
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._write()

    def table(self, title: str, columns: Sequence[str], about: str = "") -> Table:
        """Starts a table."""
        made = Table(title, list(columns), about=about)
        self._tables.append(made)
        return made

    def row(self, table: Table, *values: Any) -> None:
        """Adds a row to a table and writes the file."""
        with self._lock:
            table.rows.append(list(values))
            sys.stderr.write(f"  {' | '.join(show(value) for value in values)}\n")
            self._write()

    def problem(self, text: str) -> None:
        """Adds a failure of the part and writes the file."""
        with self._lock:
            self._problems.append(text)
            sys.stderr.write(f"  PROBLEM: {text}\n")
            self._write()

    def attempt(self, what: str, run: Callable[[], None]) -> None:
        """Runs one measurement and reports an exception as a problem, so that the next measurement can run."""
        try:
            run()
        except Exception as error:
            self.problem(f"{what}: {type(error).__name__}: {error}")

    def _write(self) -> None:
        content = {
            "title": self._title,
            "tables": [asdict(table) for table in self._tables],
            "problems": self._problems,
            "seconds": round(time.monotonic() - self._start, 1),
        }
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)


def show(value: Any) -> str:
    """Returns a value as a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def timed(step: Callable[[], Any], *, warmup: int, steps: int, wait: Callable[[], None]) -> float:
    """Returns the median seconds of ``step``, each measured with the device idle before and after."""
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def waiter(device: str) -> Callable[[], None]:
    """Returns a function that blocks until the device is idle; on the CPU it does nothing."""
    if device != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def run_python(
    module: str,
    *words: str,
    settings: Settings,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    python: str | None = None,
) -> dict[str, Any]:
    """Runs a module of this folder in a process of its own, and returns the JSON of its last line.

    Args:
        module: Name below ``on_gpu``.
        *words: Its command line.
        settings: Options of the part; a dry run hides every GPU.
        seconds: Time limit.
        environment: Further environment variables.
        python: Interpreter of an environment with another ``deepspeed``; None: this one.

    Raises:
        RuntimeError: It failed, with the end of its standard error; or it exceeded the time limit.
    """
    command = [python or sys.executable, "-m", f"on_gpu.{module}", *words]
    variables = child_environment(settings, environment)
    if python is not None:  # its own ``deepspeed`` must be found, not that of this project's folder
        variables["PYTHONPATH"] = str(ROOT / "benchmarks")
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"on_gpu.{module} {' '.join(words)}: not done after {seconds:.0f} s") from late
    if done.returncode:
        raise RuntimeError(f"on_gpu.{module} {' '.join(words)} ended with {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def planning(settings: Settings, who: str, shape: str, *, ranks: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Plans a training in another process while the caller measures it. Yields a function that returns the plan.

    The plan is a dict with ``planned`` (GB) and ``predicted`` (ms).

    Args:
        settings: Options of the part.
        who: Contestant. For those of other libraries, and in a dry run, nothing is planned: both are None.
        shape: Name of the model's shape.
        ranks: Number of ranks of the job.
    """
    if settings.dry or not who.startswith("ours"):
        yield lambda: {"planned": None, "predicted": None}
        return
    with ThreadPoolExecutor(1) as pool:
        plan = pool.submit(run_python, "planned", who, shape, str(ranks), settings=settings, seconds=150)
        yield plan.result


def child_environment(settings: Settings, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process that imports ``on_gpu``, the package and its test harness."""
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT))), OMP_NUM_THREADS="1")
    if settings.dry:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if settings.nccl is not None:
        variables["LD_PRELOAD"] = settings.nccl
    return variables | dict(further or {})
