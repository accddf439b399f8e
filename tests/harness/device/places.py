"""Where in a program something was done, found on the stack and put into words only when it is needed."""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_PYTHON = os.path.dirname(os.__file__)

_is_program: dict[CodeType, bool] = {}


def _belongs_to_program(code: CodeType) -> bool:
    known = _is_program.get(code)
    if known is None:
        name = code.co_filename
        known = not name.startswith((_HERE, _TORCH, _PYTHON, "<")) and "site-packages" not in name
        _is_program[code] = known
    return known


class Place:
    """Up to three lines of the program on the stack, the innermost first, from different files.

    Attributes:
        what: What was done there, such as ``copy_``.
    """

    __slots__ = ("frames", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        frames: list[tuple[CodeType, int]] = []
        frame = sys._getframe(1)
        while frame is not None and len(frames) < 3:
            code = frame.f_code
            if _belongs_to_program(code) and all(code.co_filename != other.co_filename for other, _ in frames):
                frames.append((code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        self.frames = frames

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for what was done in the same line in the same way."""
        return self.what, *self.frames[:2]

    def __str__(self) -> str:
        lines = [f"{os.path.relpath(code.co_filename, _ROOT)}:{line}" for code, line in self.frames]
        return f"{self.what} at {', called at '.join(lines) or 'an unknown place'}"
