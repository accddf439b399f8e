"""Whether layers of this job talk to other ranks in the middle of a backward.

A rank that waits there for the reduction of a bucket may wait for one that needs an exchange with it first: a peer
holds a bucket back in which it has unused parameters until its backward is over. So where layers communicate, no rank
waits for a reduction before its own backward is over. Layers say so when they run. It holds from then on for the models
that contain them (a recomputation may run them in the middle of a backward again), and for all until they have talked,
or their graph is gone, as a backward may go through several models; other models of the same job are as before.

Whether gradients may be missing on some ranks decides the order of transfers, which must be equal on all ranks, so that
holds for the rest of the job. What happens on simulated ranks, or happened before another job began in this
process, says nothing about it.
"""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.comm.job.job import Job
from deepspeed.comm.watch.backward_notes import BackwardComm, BackwardNotes


def note(layer: Any, *, uneven: bool = False) -> BackwardComm:
    """A layer will talk in its backward.

    Args:
        layer: The module.
        uneven: Which of its parameters get a gradient may differ between the ranks.

    Returns:
        What the graph of that backward must keep until then.
    """
    state, expected = Job.current().backward, BackwardComm()
    state.to_come.add(expected)
    state.communicating.add(layer)
    state.is_uneven = state.is_uneven or uneven
    return expected


def note_anywhere() -> None:
    """Notes an exchange in a backward whose module is not known. From now on it counts for every model of the job."""
    Job.current().backward.is_anywhere = True


class BackwardCommTracker:
    """Records whether layers of a model may start collectives during its backward.

    Args:
        model: With ``modules()``; it is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._seen: tuple[BackwardNotes | None, int] = None, 0
        self._has_communicating = False

    def may_communicate(self) -> bool:
        """Whether they may; the answer may differ between ranks."""
        state = Job.current().backward
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
    """Whether one of them has gradients on some ranks only; equal on all ranks."""
    return Job.current().backward.is_uneven
