"""The folder in which the published package compiles its extensions: one in its environment, kept between runs.

While torch compiles, a file ``lock`` makes other processes wait. A killed compiler leaves it, and then they wait for
ever. In torch's default folder the lock may belong to any running program. In a folder of its own, a benchmark that is
the only user can remove it.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class ExtensionFolder:
    """The folder of one environment; this process uses it until the object is deleted.

    Args:
        python: Python of the environment.

    Attributes:
        path: Value for ``TORCH_EXTENSIONS_DIR``.
        is_alone: Whether no other process uses the folder.
    """

    def __init__(self, python: str) -> None:
        # absolute() and not resolve(): the Python of a virtual environment is a link to another environment's.
        self.path = Path(python).absolute().parents[1] / "torch-extensions"
        self.path.mkdir(exist_ok=True)
        self._user: IO[str] = (self.path / "user").open("w")
        try:
            fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_alone = True
        except BlockingIOError:  # another benchmark uses the folder
            self.is_alone = False

    @property
    def is_built(self) -> bool:
        """Returns whether anything has been compiled already."""
        return any(self.path.glob("**/*.so"))

    def remove_left_over(self) -> None:
        """Removes the lock files of killed compilers, unless another process uses the folder.

        This process must not be compiling.
        """
        if self.is_alone:
            for lock in self.path.glob("**/lock"):
                lock.unlink(missing_ok=True)
