"""Runs the blocks of a page: files, Python over ranks, shell commands, in a folder of the page's own."""

import contextlib
import doctest
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import Block
from tests.harness import run_ranks
from tests.project.graph import ROOT

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_file(path: str) -> str:
    """Runs a file as a program on this rank and returns what it printed."""
    from deepspeed import comm

    printed, before, arguments = io.StringIO(), os.getcwd(), sys.argv
    os.chdir(Path(path).parent)
    sys.argv = [path]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        os.chdir(before)
        sys.argv = arguments
        comm.configure(enabled=False)
    return printed.getvalue()


def run_shell(commands: str, folder: Path) -> str:
    """Runs shell commands one after the other; the first failure ends them."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"exit status {done.returncode} of:\n{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_block(block: Block, folder: Path, with_slow: bool = True) -> str | None:
    """Runs one block in the page's folder.

    Returns:
        What it (rank 0 of it) printed; None if there was nothing to run.
    """
    if block.kind == "file":
        (folder / block.words[1]).write_text(block.body, encoding="utf-8")
    if block.is_slow and not with_slow:
        return None
    if block.kind == "shell":
        return run_shell(block.body, folder)
    if block.ranks == 0:
        return None
    path = folder / (block.words[1] if block.kind == "file" else f"block_{block.line}.py")
    path.write_text(block.body, encoding="utf-8")
    return run_ranks(run_file, block.ranks, str(path), timeout=120)[0]


def difference(block: Block, printed: str) -> str | None:
    """What is wrong with what a block printed; None if it is as on the page."""
    assert block.output is not None
    checker = doctest.OutputChecker()
    if checker.check_output(block.output, printed, OPTIONS):
        return None
    return f"{block}: the page shows\n{block.output}\nbut it printed\n{printed}"
