"""Copies optimizer states and hyperparameters from a checkpoint into runs.

A run holds several parameters and has one set of scalar states (``step``). Where the checkpoint has different scalars,
or states for some of the parameters only, the run is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.checkpoint.collect import is_per_element
from deepspeed.checkpoint.param_groups import NOT_HYPERPARAMETERS, choose_groups, comparable
from deepspeed.checkpoint.plan import FillEntry, ParameterMatch, state_fills
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.source import CheckpointSource, TrainingState, Wanted
from deepspeed.errors import CheckpointError
from deepspeed.ops.elementwise import NOT_FLAT
from deepspeed.zero.placement import Tier
from deepspeed.zero.update.loop import first_state
from deepspeed.zero.update.masters import MasterBucket, MasterRun


class OptimizerFiller:
    """Fills the optimizer of one rank."""

    def __init__(
        self,
        run_state: RunState,
        source: CheckpointSource,
        state: TrainingState,
        matches: Mapping[str, ParameterMatch],
    ) -> None:
        assert run_state.updater is not None, "there is an optimizer to fill"
        self._updater = run_state.updater
        self._optimizer = self._updater.optimizer
        self._masters = run_state.runtime.masters
        self._source = source
        self._state = state
        self._matches = matches
        self._group_names = run_state.group_names()
        self._choices = choose_groups(state.param_groups, matches, self._group_names)
        self.notes: list[str] = []

    def wanted(self) -> list[Wanted]:
        """Returns all per-element states that :meth:`fill` may read."""
        return [
            entry.wanted
            for master in self._masters
            for entries in state_fills(master.layout, master.rank, self._matches).values()
            for entry in entries
        ]

    # -- does it fit? --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Makes sure that the optimizer can continue from the saved states.

        Raises:
            CheckpointError: The optimizer needs states that the checkpoint does not have.
        """
        name, saved_name = type(self._optimizer).__name__, self._state.optimizer
        remedy = "Use the optimizer that saved it, or pass load_optimizer_states=False to start this one afresh"
        flat = self._updater.flat_update
        if flat is None and saved_name not in (None, name):
            raise CheckpointError(
                f"{self._source.label} has states of the optimizer {saved_name}, which do not fit {name}. {remedy}"
            )
        fresh, surplus = [], set()
        keeps_states = flat is None  # plain SGD has none
        for number, members in enumerate(self._group_names):
            needed: set[str] | None = None
            if flat is not None:
                probe = first_state(flat, {**self._optimizer.param_groups[number], **self._saved_group(number)})
                needed = {key for key, value in probe.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
                keeps_states = keeps_states or bool(first_state(flat, self._optimizer.param_groups[number]))
            for member in members:
                entry = self._matches.get(member)
                have = self._states_of(member)
                if have is None or entry is None:
                    fresh.append(member)
                    continue
                if needed is not None and not needed <= have:
                    raise CheckpointError(
                        f"{self._source.label} has the optimizer states {_list(have)} of {member!r} (saved by "
                        f"{saved_name or 'an unknown optimizer'}), but {name} needs {_list(needed)}. {remedy}"
                    )
                if needed is not None:
                    surplus |= have - needed
        trained = {member for members in self._group_names for member in members}
        idle = [name for name, entry in self._matches.items() if name not in trained and entry.states()]
        if idle:
            shown = ", ".join(repr(name) for name in idle[:5]) + (" ..." if len(idle) > 5 else "")
            self.notes.append(
                f"{len(idle)} parameters have saved masters and optimizer states, but are not trained here, so "
                f"these are not loaded: {shown}. To train them, unfreeze them before load_checkpoint"
            )
        if surplus:
            self.notes.append(f"{name} does not use the saved optimizer states {_list(surplus)}; they are not loaded")
        if fresh and self._state.scalars:
            shown = ", ".join(repr(member) for member in fresh[:5]) + (" ..." if len(fresh) > 5 else "")
            self.notes.append(f"{len(fresh)} parameters have no saved optimizer state and start afresh: {shown}")
        has_updated = bool(self._state.counters.get("global_steps"))
        if self._group_names and keeps_states and not self._state.scalars and not surplus and has_updated:
            self.notes.append("the checkpoint has no optimizer state for this model; the optimizer starts afresh")
        self._check_regrouping()
        self._check_options()

    def _states_of(self, name: str) -> set[str] | None:
        """Returns the names of the per-element states that the checkpoint has for a parameter.

        None if it never was updated.
        """
        entry = self._matches.get(name)
        if entry is None:
            return None
        states = set(entry.states())
        return states if states or entry.saved.name in self._state.scalars else None

    # -- copying -------------------------------------------------------------------------------------------------------

    def cut_runs(self) -> None:
        """Cuts runs where the saved states make it necessary. Every rank must call it."""
        labels = []
        for master in self._masters:
            labels.append([self._label(tile.logical) for tile in master.layout.tiles])
        self._updater.cut_runs(labels)

    def _label(self, name: str) -> Any:
        states = self._states_of(name)
        if states is None:
            return None
        scalars = self._scalars_of(name)
        return sorted(states), [(key, comparable(value)) for key, value in sorted(scalars.items())]

    def _scalars_of(self, name: str) -> dict[str, Any]:
        return self._state.scalars.get(self._matches[name].saved.name, {})

    @torch.no_grad()
    def fill(self) -> None:
        """Copies states and hyperparameters into this rank's runs."""
        # In the existing group dicts, since schedules may hold references to them, and first of all: hyperparameters
        # determine which states a run has.
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in self._saved_group(number).items():
                present = group.get(key)
                if isinstance(present, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                    present.fill_(float(value))
                elif isinstance(present, float) and isinstance(value, torch.Tensor):
                    group[key] = value.item()
                else:
                    group[key] = value
        for master in self._masters:
            entries = state_fills(master.layout, master.rank, self._matches)
            for run in master.runs:
                self._fill_run(master, run, entries)
        self._updater.skipped_in_a_row = self._state.skipped_in_a_row
        # without fp16 there is no scaler; a fixed scale is the configuration's
        scaler, saved = self._updater.loss_scaler, self._state.loss_scaler
        if scaler is not None and saved is not None and getattr(scaler, "dynamic", False):
            if scaler.state_dict().keys() == saved.keys():
                scaler.load_state_dict(saved)
        self._updater.count_state()

    def _fill_run(self, master: MasterBucket, run: MasterRun, entries: dict[str, list[FillEntry]]) -> None:
        tiles = [tile for tile, _, _ in master.tile_intervals(run.interval)]
        name = master.layout.tiles[tiles[0]].logical if tiles else ""
        saved = self._states_of(name) if tiles else None
        if saved is None:
            self._optimizer.state.pop(run.param, None)
            return
        group = self._optimizer.param_groups[run.interval.param_group]
        old = self._optimizer.state.get(run.param) or {}
        flat = self._updater.flat_update
        state: dict[str, Any] = {}
        if flat is not None:
            state = old
            if master.tier is Tier.DEVICE:
                flat.init_flat_state(group, run.param.data, state)
            else:
                master.keep_state(run, state, first_state(flat, group, master.flat.dtype))
        for key in sorted(saved):
            if flat is not None and key not in state:
                continue  # unused here, as check() has logged
            target = state.get(key, old.get(key))
            if target is None or not is_per_element(target, run.param):
                target = torch.zeros_like(run.param, dtype=self._matches[name].states()[key], requires_grad=False)
            for entry in entries[key]:
                if run.interval.start <= entry.start < run.interval.stop:
                    start = run.interval.start
                    self._source.read(entry.wanted, target.view(-1)[entry.start - start : entry.stop - start])
            state[key] = target
        for key, value in self._scalars_of(name).items():
            state[key] = _restored(value, state.get(key), group, run.param)
        self._optimizer.state[run.param] = state

    # -- hyperparameters and scaler ------------------------------------------------------------------------------------

    def _check_regrouping(self) -> None:
        for number, (index, sources) in enumerate(self._choices):
            if index is None:
                continue
            chosen = self._state.param_groups[index]
            different = sorted(
                {
                    key
                    for source in sources
                    for key, value in self._state.param_groups[source].items()
                    if key not in NOT_HYPERPARAMETERS and comparable(value) != comparable(chosen.get(key))
                }
            )
            if different:
                self.notes.append(
                    f"param group {number} holds parameters of the saved groups {sources}, which differ in "
                    f"{_list(different)}; it takes the values of the one that most of its elements come from"
                )

    def _check_options(self) -> None:
        for number, (index, _) in enumerate(self._choices):
            if index is None:
                continue
            for key in self._options_left_out(index):
                value = self._state.param_groups[index][key]
                self.notes.append(
                    f"param group {number} was saved with {key}={value}, which this {type(self._optimizer).__name__} "
                    f"was built without; it continues without. To continue with it, give initialize an optimizer of "
                    f"torch.optim that is built with {key}={value}"
                )

    def _options_left_out(self, index: int) -> list[str]:
        """Returns the options of a saved param group that the flat update of this optimizer would ignore."""
        if self._updater.flat_update is None:
            return []
        return [key for key in NOT_FLAT if self._state.param_groups[index].get(key)]

    def _saved_group(self, number: int) -> dict[str, Any]:
        """Returns the saved hyperparameters that param group ``number`` takes over; empty if there are none."""
        index = self._choices[number].number
        if index is None:
            return {}
        left_out = {*NOT_HYPERPARAMETERS, *self._options_left_out(index)}
        return {key: value for key, value in self._state.param_groups[index].items() if key not in left_out}


def _restored(value: Any, present: Any, group: Mapping[str, Any], param: torch.Tensor) -> Any:
    """Returns a scalar state in the form in which the optimizer keeps it."""
    if isinstance(present, torch.Tensor):
        number = value.to(present.device) if isinstance(value, torch.Tensor) else value
        return present.copy_(number) if isinstance(number, torch.Tensor) else present.fill_(number)
    if isinstance(present, (int, float)) and isinstance(value, (int, float, torch.Tensor)):
        return type(present)(value.item() if isinstance(value, torch.Tensor) else value)
    if not isinstance(value, torch.Tensor):
        return value
    on_device = value.numel() > 1 or group.get("capturable") or group.get("fused")
    return value.to(param.device if on_device else "cpu", copy=True)


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"
