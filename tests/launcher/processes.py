"""Starting real launchers, and finding every process that came from one."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

_MARK = "DS_TEST_RUN"


class Launcher:
    """A launcher over a script, in its own process.

    Args:
        folder: Where the script is written and run.
        script: Source of the rank's script (dedented).
        *options: Options of the launcher.
        arguments: Arguments of the script.
        environment: Additions to the environment; None removes a variable.
        module: The launcher's module.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str | None] | None = None,
        module: str = "deepspeed.launcher.runner",
        **popen: object,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        path = folder / "job.py"
        path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script))
        variables = {**os.environ, "DS_ACCELERATOR": "cpu", "HOME": str(folder), _MARK: self.mark}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        for name, value in (environment or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *options, str(path), *arguments],
            cwd=folder,
            env={**variables, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
            **{**pipes, **popen},
        )

    def finish(self, timeout: float = 150) -> tuple[int, str, str]:
        """Waits for the end: (exit code, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise
        return self.process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """Every living process of this run, wherever it stands in the tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def kill_all(self) -> None:
        """Cleans up after a test that failed."""
        for process in self.processes():
            process.kill()

    def wait_for_files(self, *names: str, timeout: float = 120) -> None:
        """Waits until the ranks have written these files."""

        def are_there() -> bool:
            has_ended = self.process.poll() is not None and not self.processes()
            found = all((self.folder / name).exists() for name in names)
            assert found or not has_ended, f"the launcher ended without files {names}: {self.finish()}"
            return found

        wait_until(are_there, timeout, f"files {names}")


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> float:
    """Waits for a condition; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout, f"no {what} after {timeout} s"
        time.sleep(0.05)
    return time.monotonic() - started
