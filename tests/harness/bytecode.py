"""Lets one pytest worker write the tests' bytecode while the others wait, in a fresh clone.

pytest rewrites the assertions of every test module. Collecting the tests takes 16 s of processor time where their
bytecode is not there yet and 7 s where it is, so the other processes wait for the first one.
"""

import os
import time
from pathlib import Path

COLLECTED = "TESTS_COLLECTED"  # environment: the file that the first process makes after its collection
LIMIT = 120.0  # seconds until the others collect nevertheless, for instance because the first process has failed
ROOT = Path(__file__).resolve().parents[1]


def share(folder: Path) -> None:
    """Makes the workers that this process starts wait if the tests have no bytecode yet.

    Args:
        folder: Used by these workers only.
    """
    if not any(ROOT.glob("*/__pycache__/test_*.pyc")):
        os.environ[COLLECTED] = str(folder / "collected")


def wait(is_first: bool) -> None:
    """Waits for the bytecode that the first process writes. Returns at once in that one, or if nobody is to wait."""
    path = os.environ.get(COLLECTED)
    deadline = time.monotonic() + LIMIT
    while path is not None and not is_first and not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)


def note_collected() -> None:
    """Ends the wait of the others."""
    path = os.environ.get(COLLECTED)
    if path is not None:
        Path(path).touch()
