"""Continues an engine when ranks are lost or join; ``docs/design/elastic.md`` describes the protocol."""

from __future__ import annotations

import logging
import math
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed.axes import SEQUENCE, TENSOR
from deepspeed.comm.members.member import JobPlan, RunMember
from deepspeed.comm.members.regroup import Regroup
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport
from deepspeed.elasticity.copies import (
    BuddyLink,
    CopyLayout,
    CopyStore,
    ForwardStates,
    copy_states,
    layout_of_parts,
)
from deepspeed.elasticity.elastic_run import ElasticRun, Recovery, first_members, join_line
from deepspeed.elasticity.restore import build_again, restore, take_apart
from deepspeed.elasticity.selection import RunShape
from deepspeed.engine.engine import EngineBase
from deepspeed.engine.resuming import run_state_of
from deepspeed.engine_feature import UnevenBatch
from deepspeed.errors import CallOrderError, CheckpointError, DeepSpeedError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import log_dist

# A wait fails as soon as a peer's socket closes, which can be shortly before the links record the lost member.
_LOSS_SECONDS = 3.0


class Continuation:
    """Copies an engine's states and rebuilds the engine after a change of ranks. Made by :meth:`open`."""

    def __init__(self, engine: EngineBase, run: ElasticRun, transport: Transport) -> None:
        section = engine._root.elasticity
        assert section is not None
        self._engine = engine
        self._transport = transport
        self._every = section.copy_every
        self._patience = section.patience
        self.run = run  # the state of the elastic run, which outlives the engine's job
        run.members.links.expect_beats(section.heartbeat)
        self.step: UnevenBatch | None = None  # the open step of ``ElasticSteps``; None if none is open
        self.is_replaced = False  # the engine has loaded a checkpoint, so the copies hold states that it no longer has
        self._forward: tuple[int, ForwardStates] | None = None  # updates before the step, states at its start
        self.fill_seconds = 0.0  # duration of filling the engine from copies, in seconds
        self.received_bytes = 0  # bytes of copies received from other ranks
        # the checkpoint from which the engine was filled; None if it was filled from copies
        self.loaded: str | None = None
        self._is_valid = False  # the engine's states are those of a whole number of updates
        plan = run.members.plan
        owners, run_state = [member.number for member in plan.members], run_state_of(engine)
        self._shape = shape_of(engine)
        self._numbers: dict[int, int] | None = None  # of this rank's buckets in the layout; None: the same
        if self._shape.parts == 1:
            self._layout = CopyLayout.of(run_state, plan.epoch, owners)
        else:
            self._layout, self._numbers = layout_of_parts(run_state, plan.epoch, owners, self._shape.parts, transport)
        self._buddy = BuddyLink(transport, run.held, self._layout)

    @classmethod
    def open(cls, engine: EngineBase) -> Continuation:
        """Connects the ranks of a new engine, and fills it after a change of ranks. Every rank must call it."""
        job = engine._parts.setup.job
        patience = timedelta(seconds=float(getattr(engine._root.elasticity, "patience", 600.0)))
        transport = job.axis_of(None).objects(patience=patience, why="copies of model states")
        if job.members is not None and job.members.links.is_closed:  # an earlier run has ended
            job.members = None
        run = ElasticRun.of(job)
        if run is None:
            members = job.members if job.members is not None else first_members(job, transport, shape_of(engine).parts)
            run = ElasticRun(members, CopyStore(members.links.number))
            members.elastic = run
            job.members = members
        run.begin_with(engine)
        made = cls(engine, run, transport)
        made._fill()
        return made

    def reopen(self) -> Continuation:
        """Returns itself, or the continuation of a new run if this one has ended. Every rank must call it."""
        if not self.run.members.links.is_closed:
            return self
        made = Continuation.open(self._engine)
        hooks_of(self._engine).continuation = made
        return made

    @property
    def data_rank(self) -> int:
        """This rank's data-parallel rank."""
        return self._engine._parts.coordinates.data_rank

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._engine._parts.coordinates.data_size

    # -- while training ------------------------------------------------------------------------------------------------

    def refuse_lone_update(self) -> None:
        """Raises if no step of ``ElasticSteps`` is open.

        Raises:
            CallOrderError: No step is open.
        """
        if self.step is None:
            raise CallOrderError(
                "engine.step: with elasticity.continue updates are made inside `with step:`, for the steps of "
                "deepspeed.elasticity.ElasticSteps(engine, dataset, total_steps), which divides the samples again when "
                "ranks are lost or join; see docs/guide/elastic.md"
            )

    @property
    def joining(self) -> int:
        """The number of join requests to this process, including those that spares have reported to it."""
        return self.run.members.links.joining

    def can_grow(self, joining: int) -> bool:
        """Returns whether ``joining`` new processes, with the spares, allow a job with more ranks."""
        plan, shape = self.run.members.plan, self._shape
        spares = [sum(member.part == part for member in plan.spares) for part in range(shape.parts)]
        return sum(max(shape.multiple - count, 0) for count in spares) <= joining

    def begin_step(self, step: UnevenBatch) -> None:
        """Opens a step. If no copies are made ahead, saves the states that forwards of the step change."""
        self.step = step
        if self._layout.is_whole:
            self._forward = self._engine.global_steps, ForwardStates.of(run_state_of(self._engine))

    def end_step(self) -> None:
        """Closes the step: until the next one is opened, updates are refused."""
        self.step = None

    @property
    def must_open_copies(self) -> bool:
        """Whether this rank's copies have moved to larger memory, which the buddy must open."""
        return self._buddy.must_open

    def after_update(self, *, ranks_will_change: bool = False, must_open_copies: bool = False) -> None:
        """Copies the states if that is due. Every rank must call it after each update.

        Args:
            ranks_will_change: A process joins now, so copies are due in any case.
            must_open_copies: :attr:`must_open_copies` is true on some rank. No copy is overwritten before its buddy has
                opened the memory.

        Raises:
            CommunicationError: A rank was lost.
        """
        if must_open_copies:
            self._buddy.open()
        if not self._layout.is_whole and (ranks_will_change or self._engine.global_steps % self._every == 0):
            self._copy()

    def replace_copies(self) -> None:
        """Replaces all copies by copies of the loaded checkpoint. Every rank must call it.

        Raises:
            CommunicationError: A rank was lost.
        """
        self.run.held.clear()  # first: from now on no rank may continue from the former copies
        self._buddy = BuddyLink(self._transport, self.run.held, self._layout)
        if not self._layout.is_whole:
            self._copy()
            gather_objects(self._transport, None, label="copies of what was loaded")
        self.is_replaced = False

    def _copy(self) -> None:
        started, busy = time.monotonic(), time.process_time()
        run, run_state, sent = self.run, run_state_of(self._engine), self._buddy.sent
        run_state.settle()
        nbytes = copy_states(run_state, self._layout, run.members.links.number, run.held, numbers=self._numbers)
        if not self._layout.has_replicas:
            self._buddy.exchange()
        cost = run.cost
        cost.count += 1
        cost.nbytes += nbytes
        cost.sent += self._buddy.sent - sent
        cost.seconds += time.monotonic() - started
        cost.processor += time.process_time() - busy
        cost.held = run.held.nbytes

    def finish(self) -> None:
        """Waits until all ranks have completed the last step, so none leaves while another may need its copies.

        Raises:
            CommunicationError: A rank was lost.
        """
        gather_objects(self._transport, None, label="the end of the last step")

    def leave(self) -> None:
        """Closes the links to the other members with a leave message."""
        self.run.members.links.close()

    # -- changes of the ranks ------------------------------------------------------------------------------------------

    def was_lost(self) -> bool:
        """Returns whether a member was lost. Call it after a call has failed; waits up to 3 seconds for the loss."""
        return self.run.members.links.wait_for_loss(_LOSS_SECONDS)

    def change_ranks(self, step: int) -> Continuation:
        """Agrees on a new job with the other members, rebuilds the engine and fills it from copies.

        All remaining members must call it. It starts again if more members are lost meanwhile.

        Args:
            step: The interrupted step, or the next one.

        Returns:
            The continuation of the rebuilt engine.

        Raises:
            DeepSpeedError: The run cannot continue.
        """
        links = self.run.members.links
        recovery = Recovery(step, (self._transport.size, 0))
        lost = list(links.lost.values())
        if lost:
            recovery.detected = time.monotonic() - min(each.seen for each in lost)
        self._hold_live_states()
        used = self._engine._checkpoints.used  # the engine will be rebuilt
        self.run.used = [*(folder for folder in self.run.used if folder not in used), *used]
        take_apart(self._engine)
        while True:
            known, counted, started = set(links.lost), recovery.total, time.monotonic()
            try:
                return self._change_once(recovery)
            except (DeepSpeedError, RuntimeError) as error:
                recovery.regrouped += time.monotonic() - started - (recovery.total - counted)
                if not links.wait_for_loss(_LOSS_SECONDS) or set(links.lost) <= known:
                    raise
                log_dist(f"elastic: a further member was lost meanwhile ({error}); trying again", ranks=[-1])
                take_apart(self._engine)

    def _hold_live_states(self) -> None:
        """Copies the present states if every rank has all of them and no update is incomplete."""
        updater = self._engine._updater
        if self._layout.is_whole and self._is_valid and updater is not None:
            if updater.steps == self._engine.global_steps:
                updater.carry_user_writes()
                # After a complete update the forwards of the step need not be undone.
                steps, before = self._forward or (-1, None)
                forward = before if steps == updater.steps else None
                held, number = self.run.held, self.run.members.links.number
                copy_states(run_state_of(self._engine), self._layout, number, held, forward)

    def _change_once(self, recovery: Recovery) -> Continuation:
        members, started = self.run.members, time.monotonic()
        members.starter.end_job()
        causes = {number: lost.cause for number, lost in members.links.lost.items()}
        known = len(self.run.lost)
        plan, waited = self._agree()
        # Before the job starts: if that fails, the next plan does not list these members again.
        names = [_describe_loss(each, recovery.step, causes.get(each.number, "")) for each in self.run.lost[known:]]
        recovery.lost = (*recovery.lost, *names)
        members.starter.start_job(plan).members = members
        recovery.regrouped += time.monotonic() - started - waited
        recovery.joined += len(plan.newcomers)
        started = time.monotonic()
        build_again(self._engine)
        made = continuation_of(self._engine)
        recovery.rebuilt += time.monotonic() - started - made.fill_seconds
        recovery.moved += made.fill_seconds
        recovery.nbytes += made.received_bytes
        recovery.ranks = recovery.ranks[0], len(plan.members)
        recovery.repeated = max(recovery.step - self._engine.global_steps, 0)
        recovery.loaded = made.loaded
        self.run.recoveries.append(recovery)
        made._log_recovery(recovery)
        return made

    def _agree(self) -> tuple[JobPlan, float]:
        """Returns the next plan in which this process has a rank, and the seconds that it spent as a spare before.

        Raises:
            SystemExit: With status 0, on a spare, when the run has ended.
        """
        members, served = self.run.members, frozenset[int]()
        waited, since = 0.0, time.monotonic()
        while True:
            agreed = Regroup(
                members.links,
                members.plan.epoch,
                self.run.held.listed(),
                self._shape.choose,
                members.starter.open_store,
                self._patience,
                served,
            ).run()
            if agreed is None:
                log_dist("elastic: the run has ended; this spare process exits too", ranks=[-1])
                self.leave()
                raise SystemExit(0)
            waited, since = waited + (time.monotonic() - since if served else 0.0), time.monotonic()
            # Compares with this process's own former plan: it may have missed a plan in between.
            left = {member.number for member in agreed.everybody}
            self.run.lost += [member for member in members.plan.everybody if member.number not in left]
            members.plan = agreed
            served = frozenset(member.number for member in agreed.members)
            if members.links.number in served:
                return agreed, waited
            members.starter.stand_by()
            log_dist(
                f"elastic: this process is a spare: the new job has {len(served)} ranks without it. It waits until "
                "ranks are lost or join",
                ranks=[-1],
                level=logging.WARNING,
            )

    def _fill(self) -> None:
        """Fills the engine as the plan says, and copies its states for this job. Every rank must call it."""
        started = time.monotonic()
        plan, held = self.run.members.plan, self.run.held
        if plan.epoch == self.run.filled:  # a new run, or another engine in a run whose ranks have changed
            pass
        elif plan.source is not None:
            number = self.run.members.links.number
            run_state = run_state_of(self._engine)
            # Ranks that share layers draw the same numbers.
            first = self._transport.rank // self._shape.sharing * self._shape.sharing
            alike = [member.number for member in plan.members[first : first + self._shape.sharing]]
            self.received_bytes = restore(self._engine, run_state, held, plan.source, number, self._transport, alike)
        else:
            self._load_checkpoint()
        self._is_valid = True
        if not self._layout.is_whole:
            self._copy()
        # No rank may drop the copies of the former job before all ranks have reached this point.
        used = gather_objects(self._transport, self.run.used, label="copies of all ranks")
        self.run.used = self.run.used or next(filter(None, used), [])  # a joining process has none
        held.trim(plan.epoch)
        self.run.filled = plan.epoch
        self.fill_seconds = time.monotonic() - started

    def _load_checkpoint(self) -> None:
        """Loads the last checkpoint of this run, because some states have no copy left. Every rank must call it.

        Raises:
            CheckpointError: This run has no checkpoint.
        """
        run = self.run
        chosen = None if run.checkpoints is None else Path(run.checkpoints).absolute()
        known = gather_objects(self._transport, (chosen, run.used), label="folders of checkpoints")
        used: list[Path] = next(filter(None, (folders for _, folders in known)), [])
        chosen = next(filter(None, (folder for folder, _ in known)), used[-1] if used else None)
        gone = ", ".join(member.name for member in run.lost)
        if chosen is None:
            where = "no checkpoint folder was given or saved to"
        elif chosen not in used:  # its checkpoints may be from another run
            where = f"this run has neither saved a checkpoint to {chosen} nor loaded one from there"
        else:
            self.loaded = self._engine.load_checkpoint(chosen)[0]
            where = f"{chosen} holds no checkpoint"
        if self.loaded is None:
            raise CheckpointError(
                f"elasticity.continue: all copies of some model states were lost with {gone}, and {where}, so the run "
                "cannot continue. Save checkpoints inside the steps (engine.save_checkpoint), and if they go to "
                "several folders, name one of them in ElasticSteps(checkpoints=...)"
            )

    def _log_recovery(self, recovery: Recovery) -> None:
        events = [
            (f"Train/Elastic/{name}", float(value), self._engine.global_samples)
            for name, value in (
                ("ranks", recovery.ranks[1]),
                ("lost", len(recovery.lost)),
                ("joined", recovery.joined),
                ("repeated_steps", recovery.repeated),
                ("recovery_seconds", recovery.total),
            )
        ]
        self._engine.monitor.write_events(events)
        self._engine._progress.event(
            "recovery",
            step=self._engine.global_steps,  # equal on all ranks; they may have noticed the loss in different steps
            seconds=round(recovery.total, 3),
            ranks_before=recovery.ranks[0],
            ranks_now=recovery.ranks[1],
            repeated_steps=recovery.repeated,
        )
        for name in recovery.lost:
            log_dist(f"elastic: {name}", level=logging.WARNING)
        if recovery.loaded is not None:
            log_dist(
                f"elastic: all copies of some model states are lost; the run continues from the last checkpoint, "
                f"{recovery.loaded}, after step {self._engine.global_steps}: {recovery.repeated} finished step(s) are "
                "repeated",
                level=logging.WARNING,
            )
        log_dist(
            f"elastic: went from {recovery.ranks[0]} to {recovery.ranks[1]} ranks at step {recovery.step} in "
            f"{recovery.total:.2f} s (detected {recovery.detected:.2f}, regrouped {recovery.regrouped:.2f}, rebuilt "
            f"{recovery.rebuilt:.2f}, moved {recovery.moved:.2f}, {recovery.nbytes:,} bytes to this rank); "
            f"{recovery.repeated} finished update(s) are repeated",
            level=logging.WARNING,
        )
        log_dist(join_line(self.run.members.plan, self.run.members.links.token))
        ExitNotes.here().recovered([member.pid for member in self.run.lost])
        self.run.lost = []


def shape_of(engine: EngineBase) -> RunShape:
    """Returns the constraints on the number of ranks of an engine's run."""
    mesh = engine._parts.coordinates.mesh
    tensor, experts = mesh.size(TENSOR), math.lcm(*engine._parts.setup.job.experts.sizes())
    return RunShape(parts=experts * tensor, multiple=mesh.size(SEQUENCE), sharing=tensor)


def hooks_of(engine: EngineBase) -> Any:
    """Returns the ``ElasticHooks`` of an engine; None where its configuration has no ``elasticity.continue``."""
    return engine._hooks.get("deepspeed.elasticity.feature")


def continuation_of(engine: EngineBase) -> Continuation:
    """Returns the :class:`Continuation` that rebuilds ``engine`` when ranks are lost or join.

    Raises:
        CallOrderError: The engine's configuration has no ``elasticity.continue``.
    """
    hooks = hooks_of(engine)
    found = None if hooks is None else hooks.continuation
    if found is None:
        raise CallOrderError(
            "deepspeed.elasticity.ElasticSteps: expected an engine whose configuration has elasticity.continue: true, "
            "found one without; set it"
        )
    result: Continuation = found
    return result


def _describe_loss(member: RunMember, step: int, cause: str) -> str:
    if not cause and member.host == socket.gethostname():
        cause = ExitNotes.here().cause_of(member.pid)
    return f"{member.name} was lost in step {step}{f': {cause}' if cause else ''}"
