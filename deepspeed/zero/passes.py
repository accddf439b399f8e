"""The phase that a model is in, and the pass: what is true only during one forward or one backward.

A :class:`Pass` is made when an outermost forward or a backward begins, and dropped when it ends, is paused or has
raised. Whoever gathers, frees or reduces reads it in :attr:`PassTracker.current`; nobody else keeps a part of it.

=========== ========================== =================================================================
phase       may be followed by         begins when
=========== ========================== =================================================================
IDLE        FORWARD, EVAL., BACKWARD   the pass has ended or was dropped
FORWARD     IDLE, PAUSED               a sharded module is called that is called by no other one
EVALUATION  IDLE, PAUSED               the same, under ``torch.no_grad``
PAUSED      as IDLE, and IDLE          a backward or an update begins inside a forward (a Lightning step)
BACKWARD    IDLE, PAUSED               ``engine.backward``, or a gradient arrives; recomputed forwards are a part of it
=========== ========================== =================================================================

The queues of a device in a backward at stage 3, with parameters in host memory; time runs to the right::

    compute  | backward of 2 | pack 2 | backward of 1 | pack 1 | backward of 0 | pack 0 |  wait for the sums
    gather   |  gather 1     |        |  gather 0     |
    reduce   |               |        |  reduce 2             | reduce 1              | reduce 0 |
    finish   |                                                | scale 2               | scale 1  | scale 0 |
    copy     |  shard 0 in   |                                     gradient 2 to the host | ...

- ``compute`` waits for a gather when a module or a saved tensor needs the bucket; it waits for no reduction before the
  backward ends. A peer may hold its part of a reduction back until gathers that this rank has yet to issue.
- ``gather`` and ``reduce`` are communicators: each has one queue, in one order on all ranks.
- The host runs ahead of all of them, so it limits what it has queued: see ``GradientReducer._send``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from deepspeed.errors import require_state
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.address import State
from deepspeed.zero.bucket import Bucket

UNKNOWN_ENTRY = -1  # of a backward that has reached no forward's outputs yet, or never does


class ModelPhase(Enum):
    """What a model does; the values name it in messages and checksums."""

    IDLE = "none"
    FORWARD = "forward"
    EVALUATION = "evaluation"
    PAUSED = "paused"
    BACKWARD = "backward"


_BEGINNING = {ModelPhase.FORWARD, ModelPhase.EVALUATION, ModelPhase.BACKWARD}
NEXT: dict[ModelPhase, set[ModelPhase]] = {
    ModelPhase.IDLE: _BEGINNING,
    ModelPhase.FORWARD: {ModelPhase.IDLE, ModelPhase.PAUSED},
    ModelPhase.EVALUATION: {ModelPhase.IDLE, ModelPhase.PAUSED},
    ModelPhase.PAUSED: {*_BEGINNING, ModelPhase.IDLE},
    ModelPhase.BACKWARD: {ModelPhase.IDLE, ModelPhase.PAUSED},
}


@dataclass
class Scope:
    """One running forward of a module that gathers."""

    entry: int  # number of the module
    buckets: list[Bucket]  # what the module needs
    opened_pass: bool = False  # whether the pass has begun with it
    pushed_hooks: bool = False  # whether it has installed the saved-tensor hooks
    pushed_guard: bool = False  # whether it has put a guard over saved-tensor hooks of other libraries
    held: list[Bucket] = field(default_factory=list)  # buckets of which it is a user


@dataclass
class ReductionState:
    """What a backward does with the gradients of buckets; buckets are given by their positions in the reducer."""

    reaches: Sequence[int]  # the buckets whose parameters it may reach
    reduces: frozenset[int]  # those whose gradients are reduced
    order: list[int] | None  # the order of reductions; None until the ranks have agreed on it
    combines: bool  # whether its end takes the second step of the sums
    completed: list[int] = field(default_factory=list)  # with all gradients, in the order of completion on this rank
    packed: set[int] = field(default_factory=set)  # whose gradients have left the parameters
    cursor: int = 0  # number of entries of ``order`` that have been sent
    # whether the host waits for a device that lags behind; False once a peer has held a bucket back
    is_patient: bool = True


@dataclass
class Pass:
    """One outermost forward, or one backward with the forwards that it recomputes."""

    phase: ModelPhase
    entry: int = UNKNOWN_ENTRY  # number of the module by which it enters the model; 0 is the model
    scopes: list[Scope] = field(default_factory=list)  # running forwards, outermost first
    # gathers: buckets are given by their indices
    gathered: frozenset[int] = frozenset()  # at its start, or would be if no layer were dropped
    order: list[int] | None = None  # the order that is followed; None while one is recorded
    issued: list[int] = field(default_factory=list)  # gathers so far
    serves: bool = False  # whether this rank takes part in gathers that only others want, until all are at the end
    is_alone: bool = False  # whether it is independent of other ranks
    has_decided: bool = False  # whether the ranks have compared their records of it
    is_learned: bool = False  # whether it is recorded and will be followed later
    used_leaves: set[tuple[int, ...]] = field(default_factory=set)  # leaf modules that a backward has gathered whole
    # backwards only
    is_by_program: bool = False  # whether the program has called torch's backward, not the engine's
    reached: set[int] = field(default_factory=set)  # entries of the forwards whose outputs it has come through
    # recomputed under hooks of other libraries, which save plain views: whether all gradients are there
    recomputed: dict[Bucket, bool] = field(default_factory=dict)
    reductions: ReductionState | None = None  # None where nothing is trained, and once all of them have ended


class PassTracker:
    """The present pass of one model, and what outlives it: paused forwards, and forwards without their backward."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.paused: list[Scope] = []  # forwards around a whole step that runs inside them, outermost first
        self.outstanding: Counter[int] = Counter()  # training forwards without their backward, by entry
        self.calls = 0  # running calls of ``engine.forward``
        self._open_backward: Callable[[], None] | None = None

    @property
    def phase(self) -> ModelPhase:
        """The phase of the model."""
        if self.current is not None:
            return self.current.phase
        return ModelPhase.PAUSED if self.paused else ModelPhase.IDLE

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward is open."""
        return self.current is not None and self.current.phase is ModelPhase.BACKWARD

    @property
    def scopes(self) -> list[Scope]:
        """The running forwards of the present pass, outermost first."""
        return self.current.scopes if self.current is not None else []

    @property
    def reductions(self) -> ReductionState | None:
        """The reductions of the open backward; None outside of one."""
        return self.current.reductions if self.current is not None else None

    @property
    def expects_no_gather(self) -> bool:
        """Returns whether no pass is open, or the rest of it gathers nothing, by the agreed order."""
        now = self.current
        return now is None or (now.order is not None and len(now.issued) >= len(now.order) and not now.serves)

    def begin(self, phase: ModelPhase, entry: int = UNKNOWN_ENTRY) -> Pass:
        """Begins a pass. All ranks must begin the same one."""
        require_state(phase in NEXT[self.phase], self, f"a phase that {phase.value} may follow, found {self.phase}")
        self.current = Pass(phase, entry)
        return self.current

    def end(self) -> None:
        """Drops the present pass."""
        self.current = None

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Counts a call of ``engine.forward``: a whole step inside pauses the forward, and discards nothing of it."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def attach(self, open_backward: Callable[[], None] | None) -> None:
        """Sets the function that opens a backward when a gradient hook fires; None: these open none."""
        self._open_backward = open_backward

    def open_backward(self) -> None:
        """Opens a backward if none is open. Called when a gradient hook fires, whoever has called ``backward``."""
        if self._open_backward is not None and not self.in_backward:
            self._open_backward()

    # -- freeing during a backward -----------------------------------------------------------------------------------

    def note_gradients(self, bucket: Bucket) -> None:
        """Called when all gradients of a bucket are copied out. Frees it if nothing else needs it."""
        if self.current is not None and bucket in self.current.recomputed:
            self.current.recomputed[bucket] = True
        self.free_if_done(bucket)

    @uncompiled
    def note_dead_handle(self, bucket: Bucket) -> None:
        """Called when autograd has dropped the last saved tensor of a bucket. Frees it in a backward, as above."""
        if self.in_backward:
            self.free_if_done(bucket)

    def free_if_done(self, bucket: Bucket) -> None:
        """Frees a bucket during backward if no scope, no handle and no missing gradient needs it any more.

        If several forwards wait for their backwards, kept buckets stay until the end of the backward: only then is it
        known, equally on all ranks, which forward still needs them.
        """
        if not bucket.is_sharded or bucket.state is not State.FULL or bucket.users or bucket.live_handles:
            return
        if bucket.layout.trainable and not bucket.gradients_in:
            return
        if bucket.is_kept and self.outstanding.total() > 1:
            return
        if self.current is not None and bucket in self.current.recomputed:
            return  # recomputation has saved plain views; the next unit, or the end of backward, frees the bucket
        bucket.reshard()
