"""What layers of one job have registered of their exchanges in backward passes (``comm.watch.backward_comm``)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any


class BackwardComm:
    """Communication that a layer will start in a backward; the graph keeps it alive until then."""


@dataclass(eq=False)
class BackwardNotes:
    """The notes of one job.

    Attributes:
        to_come: Exchanges in backward passes that are not over.
        communicating: Modules that have noted one.
        is_anywhere: Whether one was noted whose module is not known.
        is_uneven: Whether the parameters of one may have gradients on some ranks only.
    """

    to_come: weakref.WeakSet[BackwardComm] = field(default_factory=weakref.WeakSet)
    communicating: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    is_anywhere: bool = False
    is_uneven: bool = False
