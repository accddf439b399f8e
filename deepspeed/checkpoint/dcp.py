"""Writes a checkpoint for ``torch.distributed.checkpoint`` (DCP), which plain torch loads.

The entries are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``: ``model`` by state-dict key, and
``optim`` with ``state`` by parameter name and ``param_groups``. Beside them are ``lr_scheduler`` and ``counters``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

from deepspeed.checkpoint.consolidate import FullTensor
from deepspeed.checkpoint.format import state_of_kind
from deepspeed.checkpoint.source import CheckpointSource, TrainingState, Wanted


class _LazyTensor(torch.Tensor):
    """A tensor without storage; :class:`_ReadingPlanner` reads its values when they are written."""

    full: FullTensor


class _ReadingPlanner(DefaultSavePlanner):
    """Reads one tensor of the checkpoint at a time, so that the whole never is in memory."""

    def lookup_object(self, index: Any) -> Any:
        """Returns the value of an entry."""
        value = super().lookup_object(index)
        return value.full.contiguous() if isinstance(value, _LazyTensor) else value


def write_dcp(source: CheckpointSource, state: TrainingState, folder: Path) -> None:
    """Writes the files.

    Raises:
        CheckpointError: The source is damaged.
        OSError: A file cannot be written.
    """
    source.check([Wanted(k, n, 0, p.numel) for n, p in source.parameters.items() for k in p.kinds])
    model = {name: _lazy(FullTensor(source, name, None)) for name in (*source.parameters, *source.buffers)}
    model |= {alias: model[name] for alias, name in source.aliases.items()}
    states: dict[str, dict[str, Any]] = {name: dict(scalars) for name, scalars in state.scalars.items()}
    for name, parameter in source.parameters.items():
        for kind in parameter.kinds:
            if (key := state_of_kind(kind)) is not None:
                states.setdefault(name, {})[key] = _lazy(FullTensor(source, name, None, kind))
    content = {
        "model": model,
        "optim": {"state": states, "param_groups": state.param_groups},
        "lr_scheduler": state.lr_scheduler,
        "counters": state.counters,
    }
    # One thread: each reads a whole tensor.
    save(content, storage_writer=FileSystemWriter(folder, thread_count=1), planner=_ReadingPlanner(), no_dist=True)


def _lazy(full: FullTensor) -> _LazyTensor:
    made = torch.empty(full.shape, dtype=full.dtype, device="meta").as_subclass(_LazyTensor)
    made.full = full
    return made
