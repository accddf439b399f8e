"""Which ``aio`` settings are fastest in a folder: what ``ds_nvme_tune`` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.speed import FileSpeed, measure_files

# Settings within this share of the fastest count as equally fast: runs differ by about as much.
_AS_GOOD = 0.97


@dataclass(frozen=True)
class TuneTrial:
    """One choice of settings.

    Attributes:
        settings: What was tried.
        speeds: What was measured in each folder.
    """

    settings: IoSettings
    speeds: tuple[FileSpeed, ...]

    @property
    def seconds_per_byte(self) -> float:
        """Time to move a byte once in each way that was measured, in every folder: less is better."""
        return sum(1 / speed for folder in self.speeds for speed in folder.ours.values())

    @property
    def in_flight(self) -> int:
        """Requests under way at a time."""
        return self.settings.queue_depth * self.settings.threads


def sweep(
    folders: Sequence[Path],
    nbytes: int,
    choices: Sequence[IoSettings],
    *,
    loops: int = 3,
    operations: tuple[str, ...] = ("write", "read"),
    on_trial: Callable[[TuneTrial], None] = lambda trial: None,
) -> list[TuneTrial]:
    """Measures every choice in every folder, one after the other.

    Args:
        folders: Where files are made, one at a time, and removed.
        nbytes: Size of a file.
        choices: Settings to try.
        loops: Passes; the fastest counts.
        operations: Of ``write`` and ``read``.
        on_trial: Called after each choice.

    Raises:
        OffloadError: A disk is too small or fails.
    """
    trials = []
    for settings in choices:
        speeds = tuple(
            measure_files(folder, nbytes, settings, loops=loops, operations=operations, with_fio=False)
            for folder in folders
        )
        trials.append(TuneTrial(settings, speeds))
        on_trial(trials[-1])
    return trials


def best_of(trials: Sequence[TuneTrial]) -> TuneTrial:
    """The fastest; of those as good as it, the one with the fewest requests in flight and the smallest of them."""
    limit = min(trial.seconds_per_byte for trial in trials) / _AS_GOOD
    near = [trial for trial in trials if trial.seconds_per_byte <= limit]
    return min(near, key=lambda trial: (trial.in_flight, trial.settings.block_size, trial.seconds_per_byte))
