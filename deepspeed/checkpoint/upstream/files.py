"""The files of a tag folder, by rank, opened without running code.

The files name classes of the original package. Each has an inert stand-in here: it takes attributes and does nothing.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.bounded_pickle import check_file
from deepspeed.checkpoint.names import get_model_state_file
from deepspeed.checkpoint.restricted import allow_list, reason
from deepspeed.errors import CheckpointError

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d+)_model_states\.pt")
_NAMED = 8  # missing ranks that a message lists
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")


class UnpickledObject:
    """Has whatever attributes a pickled object of the original package had."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class UnpickledLossScaler(UnpickledObject):
    """Stands for the class of ``runtime.fp16.loss_scaler``."""


class UnpickledDynamicLossScaler(UnpickledObject):
    """Stands for the class of ``runtime.fp16.loss_scaler``."""


class ZeroStage(UnpickledObject):
    """Stands for the enumeration of ``runtime.zero.config``."""


class FragmentAddress(UnpickledObject):
    """Stands for the class of ``utils.tensor_fragment``."""


class SubparamShape(UnpickledObject):
    """Describes fused parameters, as programs state them in their universal information.

    Attributes:
        patterns: Regular expressions of their names.
        shape: Their shape; a dimension that consists of several parts is a tuple of the sizes of these.
        partition_dim: The dimension that is cut.
    """

    def __init__(self, patterns: list[str], shape: tuple[Any, ...], partition_dim: int) -> None:
        self.patterns, self.shape, self.partition_dim = patterns, shape, partition_dim


SubparamShape.__module__ = "deepspeed.checkpoint.universal_checkpoint"  # so that files name it as upstream's do


STAND_INS: list[tuple[Any, str]] = [
    (UnpickledLossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (UnpickledLossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScalerBase"),
    (UnpickledDynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (SubparamShape, "deepspeed.utils.bwc.SubparamShape"),
]
"""Each stand-in with the full name of its class; of several names the first is written."""

# What torch raises for a damaged file; the older format has no checksums.
_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


def load(path: Path, *, trust: bool = False) -> Any:
    """Opens a torch file, if possible without reading tensors. ``trust``: unpickle all, which may run code.

    Raises:
        CheckpointError: It is missing or damaged, or holds objects that only code could restore.
    """
    try:
        if trust:
            pickles: Any = _TrustingPickle
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=pickles)
        with open(path, "rb") as file:
            check_file(file)
        with allow_list(STAND_INS):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # the older format cannot be mapped
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; the checkpoint is not complete. Copy it again from its source"
        ) from None
    except (*_UNREADABLE, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}). It is damaged, or holds objects of the caller that only code "
            "can restore; if you trust the file, load_checkpoint(..., allow_pickled_objects=True) runs it"
        ) from None


class _TrustingUnpickler(pickle.Unpickler):
    """Everything is allowed, but classes of the original package are stand-ins anyway."""

    def find_class(self, module: str, name: str) -> Any:
        for stand_in, full_name in STAND_INS:
            if full_name == f"{module}.{name}":
                return stand_in
        return super().find_class(module, name)


class _TrustingPickle:
    """Has the interface that torch expects of a pickle module."""

    __name__ = "pickle"
    Unpickler = _TrustingUnpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """Reads one pickle."""
        return _TrustingUnpickler(file, **options).load()


@dataclass(frozen=True)
class Files:
    """Lists the files of one model-parallel rank in a tag folder."""

    model: tuple[Path, ...]  # model-states files by data-parallel rank; one below stage 3
    optim: tuple[Path, ...]  # optimizer-states files by data-parallel rank; none at stage 0
    shards_params: bool  # whether it is a stage-3 folder
    experts: tuple[Path, ...] = ()  # files of single experts


def find_files(folder: Path) -> tuple[Files, ...]:
    """Sorts the files of a tag folder by model-parallel and data-parallel rank.

    Raises:
        CheckpointError: Experts of several model-parallel ranks, missing files, or no model states.
    """
    plain: dict[int, Path] = {}
    model: dict[int, dict[int, Path]] = {}
    optim: dict[int, dict[int, Path]] = {}
    experts: list[Path] = []
    for path in sorted(folder.iterdir()):
        if found := _MODEL.fullmatch(path.name):
            plain[int(found[1])] = path
        elif found := _EXPERT.fullmatch(path.name):
            experts.append(path)
        elif found := _ZERO_MODEL.fullmatch(path.name):
            model.setdefault(int(found[2]), {})[int(found[1])] = path
        elif found := _OPTIM.fullmatch(path.name):
            optim.setdefault(int(found[2]), {})[int(found[1])] = path
    if not plain and not model:
        raise CheckpointError(f"{folder}: there is no model-states file; copy those of all ranks too")
    shards_params = bool(model)
    chosen = model if shards_params else {rank: {0: path} for rank, path in plain.items()}
    ranks = max((*chosen, *optim)) + 1
    missing = list(islice((rank for rank in range(ranks) if rank not in chosen or (optim and rank not in optim)), 1))
    if missing:
        raise CheckpointError(
            f"{folder}: the files of model-parallel rank {missing[0]} of {ranks} are missing; copy them too"
        )
    if ranks > 1 and experts:
        raise CheckpointError(
            f"{folder}: experts that were saved by several model-parallel ranks cannot be read; export the model with "
            "the program that wrote it"
        )
    return tuple(
        Files(
            _by_rank(folder, chosen[rank], "model_states"),
            _by_rank(folder, optim.get(rank, {}), "optim_states"),
            shards_params,
            tuple(experts),
        )
        for rank in range(ranks)
    )


def find_layers(folder: Path) -> tuple[dict[int, Path], ...]:
    """Returns the files of a pipeline's layers, by their numbers, of each tensor-parallel rank; empty in other folders.

    Raises:
        CheckpointError: Files are missing.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if named := _LAYER.fullmatch(path.name):
            found.setdefault(int(named[2] or 0), {})[int(named[1])] = path
    numbers = {number for layers in found.values() for number in layers}
    for rank in range(max(found, default=-1) + 1):
        missing = sorted(numbers - found.get(rank, {}).keys())
        if missing:
            raise CheckpointError(
                f"{folder}: tensor-parallel rank {rank} lacks the file of layer {missing[0]}; copy it too"
            )
    return tuple(found[rank] for rank in sorted(found))


def find_stages(folder: Path) -> list[Files]:
    """Returns the files of a pipeline's stages, in their order; each stage is a world of its own.

    Where layers are cut, the tensor-parallel ranks of a stage follow each other.

    Raises:
        CheckpointError: Files are missing, or are not of ZeRO stages 0 and 1, the only ones it has pipelines with.
    """
    states: dict[int, Path] = {}
    optim: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if found := _MODEL.fullmatch(path.name):
            states[int(found[1])] = path
        elif found := _OPTIM.fullmatch(path.name):
            optim.setdefault(int(found[2]), {})[int(found[1])] = path
        elif _EXPERT.fullmatch(path.name) or _ZERO_MODEL.fullmatch(path.name):
            raise CheckpointError(f"{path}: not a file of a pipeline's checkpoint; move it out of the folder")
    if not states:
        raise CheckpointError(f"{folder}: there is no model-states file; copy those of all ranks too")
    files = _by_rank(folder, states, "model_states")
    return [
        Files((path,), _by_rank(folder, optim.get(stage, {}), f"optim_states (stage {stage})"), False)
        for stage, path in enumerate(files)
    ]


def _by_rank(folder: Path, files: dict[int, Path], what: str) -> tuple[Path, ...]:
    missing = (rank for rank in range(max(files, default=-1) + 1) if rank not in files)
    named = list(islice(missing, _NAMED + 1))  # a file name may claim any number of ranks
    if named:
        more = ", ..." if len(named) > _NAMED else ""
        ranks = ", ".join(map(str, named[:_NAMED]))
        raise CheckpointError(f"{folder}: the {what} files of rank(s) {ranks}{more} are missing; copy them too")
    return tuple(files[rank] for rank in sorted(files))


def parse_optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[Any]]:
    """Returns the ZeRO stage, the data-parallel ranks and the fp32 values of a tag folder.

    Returns:
        The values by rank, as in upstream's files: at stages 1 and 2 a flat tensor per param group, at stage 3 one of
        all groups. Empty for a checkpoint of this package, which has none in these files;
        ``get_fp32_state_dict_from_zero_checkpoint`` reads both.

    Raises:
        CheckpointError: A file has no ZeRO stage.
    """
    states = [load(Path(file), trust=False).get(constants.OPTIMIZER_STATE_DICT, {}) for file in files]
    if not states or any(constants.ZERO_STAGE not in state for state in states):
        raise CheckpointError(
            f"{ds_checkpoint_dir}: expected optimizer-states files of a ZeRO checkpoint, found {len(files)} without a "
            "stage; pass get_optim_files() of the folder of one tag"
        )
    found = states[0][constants.ZERO_STAGE]
    stage = int(found.values[0] if isinstance(found, ZeroStage) else found)
    if constants.PARTITION_COUNT not in states[0]:  # of this package
        ranks = load(Path(get_model_state_file(ds_checkpoint_dir, stage)), trust=False)["dp_world_size"]
        return stage, int(ranks), []
    count = states[0][constants.PARTITION_COUNT]
    if stage >= 3:
        flat: list[Any] = [torch.cat(list(state[constants.FP32_FLAT_GROUPS])) for state in states]
    else:
        flat = [state[constants.SINGLE_PARTITION_OF_FP32_GROUPS] for state in states]
    return stage, max(count) if isinstance(count, list) else int(count), flat
