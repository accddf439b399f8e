"""Replacing attributes for a while."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patch:
    """One attribute of an object that is replaced between :meth:`apply` and :meth:`revert`.

    Args:
        owner: Module or class.
        name: The attribute.
        replacement: What it is in between.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._before: Any = _ABSENT

    def apply(self) -> None:
        """Puts the replacement in place."""
        self._before = vars(self._owner).get(self._name, _ABSENT)
        setattr(self._owner, self._name, self._replacement)

    def revert(self) -> None:
        """Puts back what was there; an attribute that other code has replaced since is left alone."""
        if vars(self._owner).get(self._name, _ABSENT) is not self._replacement:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
