"""Which worker of pytest-xdist gets which tests, and who waits for the bytecode of a fresh clone."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import bytecode
from tests.harness.waiting_tests import WAITING, WaitingTestsScheduling


class _Worker:
    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.tests: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.tests += indices

    def send_steal(self, indices: list[int]) -> None:
        self.stolen = indices

    def shutdown(self) -> None:
        self.shutting_down = True


def _scheduled(
    count: int, tests: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[WaitingTestsScheduling, list[_Worker]]:
    monkeypatch.setattr("xdist.scheduler.worksteal.parse_tx_spec_config", lambda config: range(count))
    scheduling: Any = WaitingTestsScheduling(None)  # type: ignore[arg-type]  # it would only find the workers' number
    workers = [_Worker(f"gw{number}") for number in range(count)]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    return scheduling, workers


def _names(of_waiting: int, others: int) -> list[str]:
    waiting = [f"{WAITING[0]}::test_{number}" for number in range(of_waiting)]
    rest = [f"tests/zero/test_b.py::test_{number}" for number in range(others)]
    return rest[: others // 2] + waiting + rest[others // 2 :]


def test_the_last_worker_gets_the_waiting_tests_and_nothing_else(monkeypatch):
    names = _names(3, 20)
    scheduling, (first, second, last) = _scheduled(3, names, monkeypatch)
    assert [names[index] for index in last.tests] == [name for name in names if name.startswith(WAITING)]
    assert sorted(first.tests + second.tests + last.tests) == list(range(23))
    for index in list(last.tests):
        assert last.shutting_down == (index == last.tests[-1]) and not scheduling.tests_finished
        scheduling.mark_test_complete(last, index)
    assert scheduling.remove_node(last) is None and len(last.tests) == 3
    for index in list(first.tests):  # it takes tests of the second one when it has none left
        scheduling.mark_test_complete(first, index)
    assert set(second.stolen) <= set(second.tests)


def test_the_others_take_waiting_tests_when_theirs_are_done(monkeypatch):
    scheduling, (first, second, last) = _scheduled(3, _names(9, 20), monkeypatch)
    for index in range(10):
        for worker in (first, second):
            scheduling.mark_test_complete(worker, worker.tests[index])
    assert last.stolen == last.tests[5:]
    scheduling.remove_pending_tests_from_node(last, last.stolen)
    assert {*first.tests[10:], *second.tests[10:]} == {*last.stolen}
    for index in last.tests[:4]:
        assert not last.shutting_down
        scheduling.mark_test_complete(last, index)
    assert last.shutting_down


def test_a_waiting_test_that_kills_its_worker_is_named_and_the_others_run_the_rest(monkeypatch):
    names = _names(3, 20)
    scheduling, (first, second, last) = _scheduled(3, names, monkeypatch)
    assert scheduling.remove_node(last) == names[last.tests[0]]
    for worker in (first, second):
        for index in list(worker.tests):
            scheduling.mark_test_complete(worker, index)
    assert set(last.tests[1:]) <= set(first.tests + second.tests)


@pytest.mark.parametrize(("workers", "of_waiting", "others"), [(2, 3, 20), (3, 0, 20), (3, 20, 3)])
def test_all_workers_share_the_tests_where_a_worker_of_their_own_would_not_pay(
    workers, of_waiting, others, monkeypatch
):
    _, chosen = _scheduled(workers, _names(of_waiting, others), monkeypatch)
    counts = [len(worker.tests) for worker in chosen]
    assert sum(counts) == of_waiting + others and max(counts) - min(counts) <= 1
    assert not any(worker.shutting_down for worker in chosen)


def test_the_files_are_there():
    root = Path(__file__).resolve().parents[2]
    assert all((root / place).is_file() or any((root / place).rglob("test_*.py")) for place in WAITING)


@pytest.fixture
def clone(monkeypatch, tmp_path):
    monkeypatch.setenv(bytecode.COLLECTED, "")  # so that it is put back, whether or not it was there
    monkeypatch.delenv(bytecode.COLLECTED)
    monkeypatch.setattr(bytecode, "ROOT", tmp_path)
    return tmp_path


def test_other_processes_wait_for_the_first_one_in_a_fresh_clone(clone):
    bytecode.share(clone)
    bytecode.wait(is_first=True)
    waiting = threading.Thread(target=bytecode.wait, args=(False,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    bytecode.note_collected()
    waiting.join(10)
    assert not waiting.is_alive()


def test_nobody_waits_where_bytecode_is_there(clone):
    (clone / "zero" / "__pycache__").mkdir(parents=True)
    (clone / "zero" / "__pycache__" / "test_a.pyc").touch()
    bytecode.share(clone)
    bytecode.wait(is_first=False)
    bytecode.note_collected()
    assert not (clone / "collected").exists()
