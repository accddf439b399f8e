"""Text from other processes, made safe to print."""

from __future__ import annotations

import re

# Control characters (C0, C1, DEL) except line feed and tab. They can move the cursor or reprogram a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns ``text`` with "?" in place of control characters other than line feed and tab."""
    return _CONTROL.sub("?", text)
