"""Whether layers of this program talk to other ranks in the middle of a backward.

A rank that waits there for the reduction of a bucket may wait for one that needs an exchange with it first: a peer
holds a bucket back in which it has unused parameters until its backward is over. So while layers talk, nobody waits for
a reduction before its own backward is over. Layers say so when they run; it holds from then on.
"""

from __future__ import annotations

_talks = False
_is_uneven = False


def note(*, uneven: bool = False) -> None:
    """A layer will talk in its backward.

    Args:
        uneven: Which of its parameters get a gradient may differ between the ranks.
    """
    global _talks, _is_uneven
    _talks = True
    _is_uneven = _is_uneven or uneven


def forget() -> None:
    """As before any layer said so, for a process that runs one job after another."""
    global _talks, _is_uneven
    _talks = _is_uneven = False


def layers_talk() -> bool:
    """Whether any layer does; equal on all ranks."""
    return _talks


def is_uneven() -> bool:
    """Whether one of them has gradients on some ranks only."""
    return _is_uneven
