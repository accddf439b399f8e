"""Records whether layers of this job communicate with other ranks in the middle of a backward.

A rank that waits there for the reduction of a bucket may wait for a peer that first needs an exchange with it: a peer
with unused parameters in a bucket delays its reduction until the backward is over. So if layers communicate, no rank
waits for a reduction before its own backward is over. Layers record it here when they run. From then on it applies to
the models that contain them, since a recomputation may run them again in the middle of a backward. Until their exchange
is over, or their graph is freed, it applies to all models, since one backward may pass through several.

Whether gradients may be missing on some ranks decides the order of transfers, which must be equal on all ranks. So that
flag stays set for the rest of the job. The record belongs to one job: simulated ranks and later jobs of this process
have their own.
"""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.comm.job.job import Job
from deepspeed.comm.watch.backward_notes import BackwardComm, BackwardNotes


def _notes() -> BackwardNotes:
    return Job.current().backward


def _notes_of_layers() -> BackwardNotes:
    return Job.adopt().backward  # a layer of the program may be the first to use its process group


def note(layer: Any) -> BackwardComm:
    """Records that a layer will communicate in its backward; its ranks may get gradients of different parameters.

    Returns a token that the graph of that backward must keep until the exchange.
    """
    state, expected = _notes_of_layers(), BackwardComm()
    state.to_come.add(expected)
    state.communicating.add(layer)
    state.is_uneven = True
    return expected


def note_anywhere() -> None:
    """Records an exchange in a backward whose module is not known; from now on it applies to every model of the job."""
    _notes_of_layers().is_anywhere = True


class BackwardCommTracker:
    """Records whether layers of a model, which it does not keep alive, may start collectives during its backward."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._seen: tuple[BackwardNotes | None, int] = None, 0
        self._has_communicating = False

    def may_communicate(self) -> bool:
        """Returns whether they may; the result may differ between ranks."""
        state = _notes()
        if state.is_anywhere or len(state.to_come):
            return True
        seen = state, len(state.communicating)
        if seen != self._seen:
            model = self._model()
            self._has_communicating = model is not None and any(
                module in state.communicating for module in model.modules()
            )
            self._seen = seen
        return self._has_communicating


def is_uneven() -> bool:
    """Returns whether some layer may have gradients on some ranks only; equal on all ranks."""
    return _notes().is_uneven
