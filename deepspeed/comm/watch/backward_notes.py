"""Records of the exchanges that layers of one job start in backward (see ``comm.watch.backward_comm``)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any


class BackwardComm:
    """A token for communication in a backward; the graph keeps it alive until then."""


@dataclass(eq=False)
class BackwardNotes:
    """The records of one job."""

    to_come: weakref.WeakSet[BackwardComm] = field(default_factory=weakref.WeakSet)  # exchanges that are not over yet
    # modules that have recorded an exchange
    communicating: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    is_anywhere: bool = False  # whether an exchange was recorded without its module
    is_uneven: bool = False  # whether parameters of a recorded module may have gradients on some ranks only
