"""Restores the position in the data: each rank's own, or on another layout of ranks that of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.states import restore_random_state
from deepspeed.logging import log_dist


@dataclass(frozen=True)
class DataPlan:
    """Describes how the data loader of one rank can resume."""

    is_same_layout: bool  # the checkpoint was saved by as many ranks along each axis
    has_loader: bool  # this rank has a loader with a state
    by_samples: bool  # whether the position of all ranks together must be used, since each rank's state does not fit
    problem: str | None  # why the loader cannot go to the position of all ranks together, or None


def plan_of(run_state: RunState, state: TrainingState) -> DataPlan:
    """Returns how the loader of this rank would continue. Changes nothing."""
    loader, position = run_state.dataloader, _position(state)
    is_same_layout = state.rank_state is not None and state.mesh == run_state.mesh
    if not hasattr(loader, "load_state_dict") and not hasattr(loader, "load_position"):
        return DataPlan(is_same_layout, has_loader=False, by_samples=not is_same_layout, problem=None)
    from deepspeed.data.positions import has_other_batch_size, why_not_at  # only runs with a loader need it

    by_samples = not is_same_layout
    if position is not None and state.rank_state is not None:
        by_samples |= has_other_batch_size(loader, position) or state.rank_state.get("data_is_rest", False)
    problem = None
    if by_samples:
        problem = "its position holds only for the ranks that saved it"
        if position is not None:
            problem = why_not_at(loader, position)
    return DataPlan(is_same_layout, has_loader=True, by_samples=by_samples, problem=problem)


def restore_position(run_state: RunState, state: TrainingState, plans: Sequence[DataPlan], rank: int) -> None:
    """Restores the saved position in the data, without communication.

    Random states belong to a rank, and are restored only where the layout of ranks is the same.
    """
    mine, position = plans[rank], _position(state)
    if mine.has_loader and any(plan.by_samples for plan in plans):
        problem = next((plan.problem for plan in plans if plan.problem is not None), None)
        if problem is None:
            from deepspeed.data.positions import go_to_position

            assert position is not None
            go_to_position(run_state.dataloader, position)
        elif run_state.sampler_state() is None:
            log_dist(
                "load_checkpoint: the layout of ranks (or the micro-batch) differs from that of the save, and the "
                f"position in the data is not restored: {problem}. The data start from the beginning; skip the samples "
                "that were used, or resume on the same layout of ranks",
                level=WARNING,
            )
    elif mine.has_loader:
        _restore_own(run_state, state)
    if mine.is_same_layout:
        assert state.rank_state is not None
        restore_random_state(state.rank_state["random"])


def _position(state: TrainingState) -> dict[str, Any] | None:
    return state.model_states.get("data_position")


def _restore_own(run_state: RunState, state: TrainingState) -> None:
    """Restores the loader's own state, which counts the batches of this rank."""
    loader, saved = run_state.dataloader, state.rank_state
    restore = getattr(loader, "load_state_dict", None)
    if saved is None or not callable(restore) or "data" not in saved:
        return
    from deepspeed.data.loader import epoch_sampler_of
    from deepspeed.data.positions import has_shared_order, start_next_pass_after

    if has_shared_order(loader):
        start_next_pass_after(loader, saved.get("data_passed", 0))
    if "data_epoch" in saved and (sampler := epoch_sampler_of(loader)) is not None:
        sampler.set_epoch(saved["data_epoch"])
    restore(saved["data"])  # draws random numbers, so it comes before the random state
