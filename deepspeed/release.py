"""The version of this package and the commit it is made from, for modules that must not import the root."""

from __future__ import annotations

from functools import cache
from pathlib import Path

RELEASE = "1.1.0"
UNKNOWN = "unknown"
COMMIT_FILE = "commit.txt"
"""The file of a wheel or an sdist beside this module, with the commit; ``hatch_build.py`` writes it."""


def _commit_and_branch(package: Path) -> tuple[str, str]:
    """Returns the commit and the branch that the package in a folder comes from, "unknown" where nothing tells."""
    if (written := package / COMMIT_FILE).exists():
        return written.read_text(encoding="utf-8").strip(), UNKNOWN
    git = package.parent / ".git"
    try:
        if git.is_file():  # a second worktree: the file names its folder, which names the common one
            git = package.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        reference = head.removeprefix("ref: ")
        if reference == head:
            return head, UNKNOWN
        common = git / "commondir"
        refs = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
        return _commit_of(refs, reference), reference.removeprefix("refs/heads/")
    except OSError:
        return UNKNOWN, UNKNOWN


def _commit_of(git: Path, reference: str) -> str:
    if (loose := git / reference).exists():
        return loose.read_text(encoding="utf-8").strip()
    for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return UNKNOWN


COMMIT, BRANCH = _commit_and_branch(Path(__file__).parent)
VERSION = RELEASE if COMMIT == UNKNOWN else f"{RELEASE}+g{COMMIT[:8]}"
"""The version of the distribution. Its local label tells it from the package of this name in the public registry."""


@cache  # reading the metadata takes a millisecond
def info_line() -> str:
    """Returns a line that tells which package runs: version, commit, branch, distribution and path.

    Tests of Transformers look for its first two words.
    """
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        distribution = f"deepspeed {version('deepspeed')}"
    except PackageNotFoundError:
        distribution = "none, not installed"
    return (
        f"DeepSpeed info: version={VERSION}, git-hash={COMMIT}, git-branch={BRANCH}, distribution={distribution}, "
        f"path={Path(__file__).parent}"
    )
