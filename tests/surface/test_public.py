"""The public surface is what the last version promised, apart from changes that ``CHANGELOG.md`` declares."""

import hashlib
import subprocess
import sys

import pytest

from deepspeed.release import RELEASE
from tests.project.graph import ROOT
from tests.surface import public

AGAIN = "run python -m tests.surface.public, and name the change in CHANGELOG.md"
SHA256 = {
    "public-1.0.0.txt": "6ab34da103b241f47855c0a558c9da9053f96c9ede49e256a251487119841e46",
}


@pytest.fixture(scope="module")
def present() -> list[str]:
    """The lines of the present code, from a process of its own: the import of every module changes this one."""
    code = "from tests.surface import public; print('\\n'.join(public.lines()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_of_the_last_version_is_missing_without_being_declared(present):
    broken = public.breaks(public.promised(), present)
    undeclared = [line for line in broken if public.path_of(line) not in public.declared()]
    assert not undeclared, (
        f"{public.last_file().name} promises {len(undeclared)} lines that the code no longer keeps. Keep them; in a "
        f"version that may drop them, declare each below '{public.DECLARED}' in {public.CHANGES.name}:\n"
        + "\n".join(undeclared)
    )


def test_declared_changes_are_changes(present):
    changed = {public.path_of(line) for line in public.breaks(public.promised(), present)}
    kept = set(public.declared()) - changed
    assert not kept, f"these are as in the last version; take them out of '{public.DECLARED}': {sorted(kept)}"


def test_what_is_new_is_written_down(present):
    written, new = public.NEW.read_text(encoding="utf-8").splitlines(), public.new_lines(present)
    missing, gone = sorted({*new} - {*written}), sorted({*written} - {*new})
    assert not missing, f"{len(missing)} public lines are not in {public.NEW.name}; {AGAIN}:\n" + "\n".join(missing)
    assert not gone, f"{public.NEW.name} has {len(gone)} lines that are gone; {AGAIN}:\n" + "\n".join(gone)


def test_a_released_version_is_written_down():
    has_file = public.file_of(RELEASE) == public.last_file()
    assert has_file == public.is_released(), f"{RELEASE}: {public.CHANGES.name} must date it, and --release record it"


def test_what_a_version_has_promised_stays_as_it_was():
    written = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in public.HERE.glob("public-*.txt")}
    assert written == SHA256, "the file of a version is written once; add its digest to SHA256 then"


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("name a.f(x, y=1)", "name a.f(x, y=1)", True),
        ("name a.f(x, y=1)", "name a.f(x, y=1, z=2)", True),
        ("name a.f(x, **rest)", "name a.f(x, *, z=2, **rest)", True),
        ("name a.f(x, y=1)", "name a.f(x, y=2)", False),
        ("name a.f(x, y)", "name a.f(x=1, y=2, z=3)", True),
        ("name a.f(x, y=1)", "name a.f(x, y)", False),
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
