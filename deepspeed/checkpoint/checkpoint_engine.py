"""What writes and reads files that a program names itself, such as a layer of a pipeline in a file of its own.

``PipelineModule.save_state_dict`` and ``load_state_dir`` take one, of a program's own class if it derives one.
``engine.save_checkpoint`` does not: its files have checksums, and parts that any number of ranks can read.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.restricted import dumps, loads

FilePath = str | PathLike[str]


class CheckpointEngine:
    """Base class of what stores state dicts by path. Rank-local: nothing here is a collective.

    Args:
        config_params: Of a derived class.
    """

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    def create(self, info: Any) -> None:
        """Called before the files of a checkpoint are saved.

        Args:
            info: The tag, or what a program says of the checkpoint.
        """

    def save(self, state_dict: Any, path: FilePath) -> None:
        """Stores ``state_dict`` under ``path``.

        Raises:
            NotImplementedError: In the base class.
        """
        raise NotImplementedError(f"{type(self).__name__}.save: derive it from CheckpointEngine with a save(...)")

    def load(self, path: FilePath, map_location: Any = None) -> Any:
        """Returns what :meth:`save` stored under ``path``.

        Args:
            path: Of the file.
            map_location: Device of the tensors, as of ``torch.load``; None: the host.

        Raises:
            NotImplementedError: In the base class.
        """
        raise NotImplementedError(f"{type(self).__name__}.load: derive it from CheckpointEngine with a load(...)")

    def commit(self, info: Any) -> bool:
        """Returns whether all files since :meth:`create` are stored; called behind the last one."""
        return True

    def makedirs(self, path: FilePath, exist_ok: bool = False) -> None:
        """Makes a folder and those above it.

        Raises:
            FileExistsError: It exists, and ``exist_ok`` is false.
        """
        os.makedirs(path, exist_ok=exist_ok)

    def is_decoupled(self) -> bool:
        """Returns whether :meth:`save` returns before the file is stored."""
        return False

    def cleanup(self) -> None:
        """Frees what the engine holds; called when it is not used any more."""


class TorchCheckpointEngine(CheckpointEngine):
    """Files of ``torch.save``, each replaced in one step, and read without running code."""

    @override
    def save(self, state_dict: Any, path: FilePath) -> None:
        disk.replace_file(Path(path), dumps(state_dict))

    @override
    def load(self, path: FilePath, map_location: Any = None) -> Any:
        """Returns what was saved under ``path``.

        Raises:
            CheckpointError: The file is damaged, or holds objects that only code could restore.
        """
        found = loads(Path(path).read_bytes(), str(path))
        return found if map_location is None else _moved(found, torch.device(map_location))


def _moved(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with the tensors in its dicts, lists and tuples on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, _moved(each, device)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    return value
