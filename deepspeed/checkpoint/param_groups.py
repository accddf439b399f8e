"""Merges the param groups of all ranks into one list, and matches a model's groups with saved ones.

A group is identified by its parameters. Its number is meaningful on one rank only: each pipeline stage has its own
optimizer, whose groups differ in number and in values.

A learning-rate schedule keeps lists with one entry per group (``base_lrs`` of torch's). They follow the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.plan import ParameterMatch
from deepspeed.logging import logger

Group = dict[str, Any]
Path = tuple[Any, ...]
"""Path of an entry in a schedule's state: keys and positions."""

NOT_HYPERPARAMETERS = frozenset({"params", "param_names", "exp_avg_mask"})  # masks belong to the program
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "unscaled"}
)
"""Entries of a schedule's state that have one value per param group: torch's, and ``data.batching.rates``'s."""


class RankGroups(NamedTuple):
    """Param groups of one rank."""

    hyperparameters: list[Group]
    scheduled: list[dict[Path, Any]]  # what the learning-rate schedule keeps for each group, by place in its state

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None, schedule: Mapping[str, Any] | None) -> RankGroups:
        """Returns those of an optimizer and of the state of its schedule; either may be None."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "exp_avg_mask")}
            for group in (optimizer.param_groups if optimizer is not None else [])
        ]
        scheduled: list[dict[Path, Any]] = [{} for _ in groups]

        def note(path: Path, values: list[Any]) -> list[Any]:
            if len(values) == len(groups):
                for entries, value in zip(scheduled, values, strict=True):
                    entries[path] = value
            return values

        _with_lists(schedule or {}, note)
        return cls(groups, scheduled)

    def same(self, number: int, other: RankGroups, other_number: int) -> bool:
        """Returns whether group ``number`` has the values of group ``other_number`` of another rank."""
        mine, theirs = (
            [{key: comparable(value) for key, value in values.items()} for values in (held, scheduled)]
            for held, scheduled in (
                (self.hyperparameters[number], self.scheduled[number]),
                (other.hyperparameters[other_number], other.scheduled[other_number]),
            )
        )
        return mine == theirs


@dataclass
class MergedGroups:
    """Param groups of all ranks."""

    # hyperparameters of each group; ``params`` lists names of logical parameters
    groups: list[Group] = field(default_factory=list)
    # state of the learning-rate schedule, whose lists have one entry per group of ``groups``; or None
    schedule: dict[str, Any] | None = None


def merge_groups(
    ranks: Sequence[tuple[RankGroups, Sequence[Sequence[str]]]], schedule: dict[str, Any] | None
) -> MergedGroups:
    """Merges the groups of several ranks, each with the names of the parameters that its rank stands for.

    Groups of two ranks become one where their hyperparameters and their entries of the schedule are equal; that of the
    same number goes first. Two groups of one rank stay apart.
    """
    merged = MergedGroups(schedule=schedule)
    first_seen: list[tuple[RankGroups, int]] = []  # where each merged group was seen first
    owners: dict[str, int] = {}
    for position, (record, members) in enumerate(ranks):
        taken: set[int] = set()
        for number, names in enumerate(members):
            first = [number] if number < len(first_seen) else []
            fitting = (
                p for p in (*first, *range(len(first_seen))) if p not in taken and record.same(number, *first_seen[p])
            )
            place = next(fitting, None)
            if place is None:
                if position and not names:
                    continue
                place = len(first_seen)
                first_seen.append((record, number))
                merged.groups.append({**record.hyperparameters[number], "params": []})
            taken.add(place)
            for name in names:
                if owners.setdefault(name, place) == place:
                    merged.groups[place]["params"].append(name)
                else:
                    logger.warning(
                        "save_checkpoint: parameter %r: expected equal hyperparameters on all ranks that hold a part "
                        "of it, found different ones; saving those of the first. Put its parts in equal groups",
                        name,
                    )
    for group in merged.groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    if schedule is not None and len(ranks) > 1:
        entries = [record.scheduled[number] for record, number in first_seen]
        merged.schedule = _with_lists(
            schedule,
            lambda path, values: [e[path] for e in entries] if entries and all(path in e for e in entries) else values,
        )
    return merged


def join_groups(groups: list[Group], further: Sequence[Group]) -> None:
    """Adds groups of another stage to ``groups``, in place: into one with equal hyperparameters, or as new ones.

    A parameter that is in a group already stays there.
    """
    named = {name for group in groups for name in group["params"]}
    taken: set[int] = set()
    for number, group in enumerate(further):
        names = [name for name in group["params"] if name not in named]
        places = (*([number] if number < len(groups) else []), *range(len(groups)))
        place = next((p for p in places if p not in taken and _values(groups[p]) == _values(group)), None)
        if place is None:
            place = len(groups)
            groups.append({**group, "params": []})
        taken.add(place)
        groups[place]["params"] += names


def _values(group: Group) -> dict[str, Any]:
    return {key: comparable(value) for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def _with_lists(
    state: Mapping[str, Any], change: Callable[[Path, list[Any]], list[Any]], path: Path = ()
) -> dict[str, Any]:
    """Returns a schedule's state with per-group lists replaced by ``change(path, list)``, in nested schedules too."""
    made: dict[str, Any] = {}
    for key, value in state.items():
        here = (*path, key)
        if key in _PER_GROUP and isinstance(value, list):
            made[key] = change(here, value)
        elif isinstance(value, dict):
            made[key] = _with_lists(value, change, here)
        elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            made[key] = [
                _with_lists(entry, change, (*here, number)) if isinstance(entry, dict) else entry
                for number, entry in enumerate(value)
            ]
        else:
            made[key] = value
    return made


class GroupChoice(NamedTuple):
    """Names the saved param groups whose values a param group of the model takes over."""

    # the saved group that most elements come from; None: none of its parameters was in a saved group
    number: int | None
    sources: list[int]  # all saved groups that its parameters come from


def choose_groups(
    saved: Sequence[Group], matches: Mapping[str, ParameterMatch], group_names: Sequence[Sequence[str]]
) -> list[GroupChoice]:
    """Returns for each of the model's param groups the saved one that it continues from.

    A group without trained parameters (all are frozen now) continues from the saved one of the same number, where there
    are as many and no other group takes it: its learning rate counts again when its parameters are unfrozen.
    """
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    choices = []
    for members in group_names:
        votes: dict[int, int] = {}
        for member in members:
            entry = matches.get(member)
            index = group_of.get(entry.saved.name) if entry is not None else None
            if entry is not None and index is not None:
                votes[index] = votes.get(index, 0) + entry.saved.numel
        chosen = max(votes, key=lambda index: (votes[index], -index)) if votes else None
        choices.append(GroupChoice(chosen, sorted(votes)))
    if len(saved) == len(choices):
        taken = {index for choice in choices for index in choice.sources}
        for number, members in enumerate(group_names):
            if not members and number not in taken:
                choices[number] = GroupChoice(number, [number])
    return choices


def schedule_for(
    state: dict[str, Any], present: Mapping[str, Any], saved_count: int, choices: Sequence[GroupChoice]
) -> dict[str, Any]:
    """Returns the state of a schedule for other param groups than those that it was saved with."""
    if saved_count == 0 or [choice.number for choice in choices] == list(range(saved_count)):
        return state
    own: dict[Path, list[Any]] = {}

    def note(path: Path, values: list[Any]) -> list[Any]:
        own[path] = values
        return values

    _with_lists(present, note)

    def change(path: Path, values: list[Any]) -> list[Any]:
        mine = own.get(path, [])
        if len(values) != saved_count or len(mine) != len(choices):
            return values
        return [
            mine[number] if choice.number is None else values[choice.number] for number, choice in enumerate(choices)
        ]

    return _with_lists(state, change)


def comparable(value: Any) -> Any:
    """Returns ``value`` in a form that ``==`` compares; large tensors by shape and sum."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= 64 else (tuple(value.shape), value.double().sum().item())
    return value
