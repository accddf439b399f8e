"""Where in a program something was done, found on the stack and put into words only when it is needed."""

import os
import sys
from types import CodeType

import torch

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_PYTHON = os.path.dirname(os.__file__)

# By the address of its code, which the entry keeps: the file of a function of the program, empty for any other one.
_files: dict[int, tuple[str, CodeType]] = {}


def _note_file(code: CodeType) -> tuple[str, CodeType]:
    name = code.co_filename
    is_program = not name.startswith((_HERE, _TORCH, _PYTHON, "<")) and "site-packages" not in name
    found = _files[id(code)] = (name if is_program else "", code)
    return found


class Place:
    """Up to three lines of the program on the stack, the innermost first, from different files.

    Attributes:
        what: What was done there, such as ``copy_``.
    """

    __slots__ = ("frames", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        frames: list[tuple[CodeType, int]] = []
        files: list[str] = []
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            file, _ = _files.get(id(code)) or _note_file(code)
            if file and file not in files:
                files.append(file)
                frames.append((code, frame.f_lineno))
                if len(frames) == 3:
                    break
            frame = frame.f_back  # type: ignore[assignment]
        self.frames = frames

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for what was done in the same line in the same way."""
        return self.what, *self.frames[:2]

    def __str__(self) -> str:
        lines = [f"{os.path.relpath(code.co_filename, _ROOT)}:{line}" for code, line in self.frames]
        return f"{self.what} at {', called at '.join(lines) or 'an unknown place'}"
