"""Processes of their own without the second or two that each would need to import torch.

A template process has imported what every one of them begins with and has done nothing else; it forks them, each with
the environment, the standard output and error that it is given.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TEMPLATE = """
import gc, json, os, sys
import torch, torch.distributed as td, deepspeed.comm as dist

gc.collect()
gc.freeze()  # the end of an interpreter looks through all that torch has made, which takes 0.4 s of each job
for line in sys.stdin:
    job = json.loads(line)
    if os.fork():
        continue
    process = os.fork()
    if process:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with open(job["folder"] + "/status.part", "w") as file:
            file.write(str(status))
        os.rename(job["folder"] + "/status.part", job["folder"] + "/status")
        os._exit(0)
    for number, name in ((0, os.devnull), (1, job["folder"] + "/out"), (2, job["folder"] + "/err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(job["environ"])
    break
else:
    os._exit(0)
exec(compile(job["code"], "<string>", "exec"), {"os": os, "torch": torch, "td": td, "dist": dist})
"""


class Job:
    """Python code in a process of its own, as ``python -W error -c`` would run it.

    Args:
        code: Finds ``os``, ``torch``, ``td`` (torch.distributed) and ``dist`` (deepspeed.comm) imported.
        environ: All of its environment.

    Attributes:
        returncode: Once :meth:`communicate` has returned.
    """

    def __init__(self, code: str, environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="job-")
        pipe = _template().stdin
        assert pipe is not None
        pipe.write(json.dumps({"code": code, "environ": environ, "folder": self._folder.name}) + "\n")
        pipe.flush()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote to standard output and standard error, once it has ended."""
        folder = Path(self._folder.name)
        deadline = time.monotonic() + timeout
        while not (folder / "status").exists():
            assert time.monotonic() < deadline, f"not over after {timeout} s: {(folder / 'err').read_text()}"
            time.sleep(0.005)
        self.returncode = int((folder / "status").read_text())
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        self._folder.cleanup()
        return out, err


@functools.cache
def _template() -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "error", "-c", _TEMPLATE]
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    atexit.register(process.stdin.close)  # then it ends
    return process
