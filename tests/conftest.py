"""What all tests share: one thread per process, the GPU marker, and a summary of what did not run."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: ranks and tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.harness import bytecode, event_loops, fork_server, programs, scheduling, shut_down
from tests.harness.pool import MODELS

# The same examples in every run, so that a change is judged by what it changes; `make test-all` draws new ones.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Before a process is started, since all of them inherit it.
scheduling.interrupt_nobody()
event_loops.let_them_wait()

_deselected: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        return
    # This process starts those of pytest-xdist, which run the tests.
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    runs_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    uses_models = runs_all and importlib.util.find_spec("transformers") is not None
    fork_server.start_shared(folder, MODELS if uses_models else ())
    bytecode.share(folder)


def pytest_collection(session: pytest.Session) -> None:
    bytecode.wait(is_first=getattr(session.config, "workerinput", {}).get("workerid", "gw0") == "gw0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    from tests.harness import waiting_tests  # imports xdist

    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else waiting_tests.workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.harness import waiting_tests

    return waiting_tests.WaitingTestsScheduling(config, log) if config.option.dist == "worksteal" else None


# Modules and tests stay to the end, a million objects: looking through them takes half a second each time, first while
# they are loaded, and then wherever a test or an engine asks for a collection.
gc.disable()


def pytest_collection_finish() -> None:
    bytecode.note_collected()
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)  # syntax trees of all modules are another million, which tests keep for each other
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; this machine has none"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The test's own folder as a text, as configurations and checkpoints have it."""
    return str(tmp_path)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that needs a group runs in the harness: one that stays in this process would change the next test."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group in pytest's own process; run what needs one by run_ranks(..., 1)")


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        _deselected["marked slow (make test-all)" if item.get_closest_marker("slow") else "not selected"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    shut_down()
    if hasattr(session.config, "workeroutput"):  # one of several processes that share the tests (pytest-xdist)
        session.config.workeroutput["deselected"] = dict(_deselected)
    gc.collect()
    gc.freeze()  # pytest collects five times at its end, so that destructors which fail are seen: of what is new only


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process has selected for itself, all of them the same."""
    _deselected.update(getattr(node, "workeroutput", {}).get("deselected", {}) if not _deselected else {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for_want_of_a_program: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = text.removeprefix("Skipped: ")
        reasons[f"skipped: {text}"] += 1
        if text.startswith(programs.PREFIX):
            for_want_of_a_program.setdefault(text, []).append(report.nodeid)
    for report in terminalreporter.stats.get("xfailed", []):
        reasons[f"expected to fail: {report.wasxfail}"] += 1
    for reason, count in _deselected.items():
        reasons[f"left out: {reason}"] += count
    if reasons:
        terminalreporter.section("what did not run, and why")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:6d}  {reason}")
    if for_want_of_a_program:
        terminalreporter.section("not run for want of a program")
        for reason, tests in sorted(for_want_of_a_program.items()):
            terminalreporter.line(f"{reason}:")
            for test in tests:
                terminalreporter.line(f"        {test}")
