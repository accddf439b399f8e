"""The public surface is what the last version promised: nothing is missing, nothing is called in another way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepspeed.release import VERSION
from tests.project.graph import ROOT
from tests.surface import public

AGAIN = "run python -m tests.surface.public, and name the change in CHANGELOG.md"


@pytest.fixture(scope="module")
def present() -> list[str]:
    """The lines of the present code, from a process of its own: the import of every module changes this one."""
    code = "from tests.surface import public; print('\\n'.join(public.lines()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_of_the_last_version_is_missing(present):
    promised = public.last_file().read_text(encoding="utf-8").splitlines()
    broken = public.breaks(promised, present)
    assert not broken, (
        f"{public.last_file().name} promises {len(broken)} lines that the code no longer keeps. Keep them; in a new "
        f"version that may drop them, {AGAIN}:\n" + "\n".join(broken)
    )


def test_what_is_new_is_written_down(present):
    promised = public.last_file().read_text(encoding="utf-8").splitlines()
    new = sorted({*present} - {*promised})
    assert not new, f"{len(new)} public lines are not in {public.last_file().name}; {AGAIN}:\n" + "\n".join(new)


def test_the_version_in_hand_is_written_down():
    assert public.file_of(VERSION) == public.last_file(), f"version {VERSION} has no file: {AGAIN}"


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("name a.f(x, y=1)", "name a.f(x, y=1)", True),
        ("name a.f(x, y=1)", "name a.f(x, y=1, z=2)", True),
        ("name a.f(x, **rest)", "name a.f(x, *, z=2, **rest)", True),
        ("name a.f(x, y=1)", "name a.f(x, y=2)", False),
        ("name a.f(x, y=1)", "name a.f(x, z=2, y=1)", False),
        ("name a.f(x, y=1)", "name a.f(x, y=1, z)", False),
        ("name a.f(x, y=1)", "name a.f(x)", False),
        ("name a.f(x, y=1)", "name a.g(x, y=1)", False),
        ("name a.f(x, y=1)", "name a.f", False),
        ("alias a.f = b.f", "name a.f(x)", True),
        ("alias a.f = b.f", "name b.f(x)", False),
        ("name a.F(x)", "alias a.F = b.F", True),
        ("key a.b = 1", "key a.b = 2", False),
        ("option ds_plan --sweep", "option ds_plan --swoop", False),
    ],
)
def test_what_counts_as_kept(old, new, kept):
    assert public.breaks([old], [new]) == ([] if kept else [old])


def test_methods_of_a_class_that_became_another_name():
    new = ["alias a.F = a.G", "name a.G(x)", "name a.G.run(self, x)"]
    assert public.breaks(["name a.F(x)", "name a.F.run(self, x)"], new) == []
    gone = ["name a.F.end(self)", "name a.F.run(self, y)"]
    assert public.breaks(gone, new) == gone
