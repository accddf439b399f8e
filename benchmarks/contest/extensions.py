"""Where the published package compiles its extensions: a folder in its own environment, kept between runs.

torch guards a compile with a file that does not record who made it and that nobody removes when its maker is killed:
whoever comes later waits for ever, and in the folder that all programs share that may be any program. So each
environment has a folder of its own, and whoever has it to himself takes such files for left over.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class ExtensionFolder:
    """The folder of one environment, in use until it is dropped.

    Args:
        python: The environment's Python.

    Attributes:
        path: For ``TORCH_EXTENSIONS_DIR``.
    """

    def __init__(self, python: str) -> None:
        # Not resolved: the Python of a virtual environment is a link to another one's.
        self.path = Path(python).absolute().parents[1] / "torch-extensions"
        self.path.mkdir(exist_ok=True)
        self._user: IO[str] = (self.path / "user").open("w")
        try:
            fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_alone = True
        except BlockingIOError:  # another benchmark compiles here, or waits for its own compiler
            self.is_alone = False

    @property
    def is_built(self) -> bool:
        """Whether anything has been compiled already."""
        return any(self.path.glob("**/*.so"))

    def remove_left_over(self) -> None:
        """Takes away the guards of compilers that were killed. Nothing of this process may be compiling."""
        if self.is_alone:
            for guard in self.path.glob("**/lock"):
                guard.unlink(missing_ok=True)
