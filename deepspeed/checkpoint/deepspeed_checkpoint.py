"""``DeepSpeedCheckpoint``: reads one checkpoint folder rank by rank, for programs that convert it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.consolidate import full_tensors
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.directory import Format, find, format_of, what_exists
from deepspeed.checkpoint.load import read_training_state
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.upstream.files import Files, find_files, find_layers, find_stages, load
from deepspeed.errors import CheckpointError

ITERATION_KEY = "iteration"
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
FINAL_LAYER_NORM_INDEX = -1
_LARGE = ("module", "optimizer")


class DeepSpeedCheckpoint:
    """Reads one checkpoint folder, of the original package or of this one, as converters do. Rank-local.

    A pipeline's first layer is the embedding, the one at ``final_layer_norm_idx`` the last norm, and those between are
    the transformer layers, which are divided again over ``pp_degree`` stages. Slices of tensor-parallel ranks are not
    joined or cut: the files do not record along which axis (``engine.load_checkpoint`` reads any topology).
    A folder of this package has whole weights: one tensor rank, one stage, and no files of layers or ZeRO ranks.

    Args:
        dir: Folder of one tag, or of checkpoints with a ``latest``.
        tp_degree: Tensor-parallel ranks; None, or as many as wrote it.
        pp_degree: Pipeline stages to divide the transformer layers over; None for as many as wrote it.
        dp_degree: Data-parallel ranks; None, or as many as wrote it.
        final_layer_norm_idx: Index of the last norm among the layers; layers after it are no transformer layers.
        allow_pickled_objects: Also restore objects of the caller (Megatron's ``args``), which may run code. Only for
            files that you trust.

    Raises:
        CheckpointError: There is no checkpoint, files are missing or damaged, or the degrees do not fit.
    """

    def __init__(
        self,
        dir: str | PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
        *,
        allow_pickled_objects: bool = False,
    ) -> None:
        folder, kind = _tag_folder(Path(dir))
        self.dir = str(folder)  # the tag folder
        self._trust = allow_pickled_objects
        self._is_ours = kind is Format.OURS
        self._layers: tuple[dict[int, Path], ...] = ()
        self._ranks: tuple[Files, ...] = ()
        if self._is_ours:
            with CheckpointReader(folder) as reader:
                state = read_training_state(reader, -1, trust=allow_pickled_objects)
            first = {**state.model_states, "dp_world_size": state.world_size}
        else:
            self._layers = find_layers(folder)
            self._ranks = tuple(find_stages(folder) if self._layers else find_files(folder))
            first = load(self._ranks[0].model[0], trust=allow_pickled_objects)
        # everything of the first model-states file but weights and optimizer
        self.global_state: dict[str, Any] = {key: value for key, value in first.items() if key not in _LARGE}
        # model-states files of the stages and tensor-parallel ranks
        self.mp_rank_files = [str(files.model[0]) for files in self._ranks]
        # names of a pipeline's layers, such as ``layer_03``
        self.layer_keys = [f"layer_{number:02d}" for number in sorted(self._layers[0] if self._layers else ())]
        self.layer_count = len(self.layer_keys)
        self.pipeline_parallel = bool(self._layers)

        dimensions = first.get("checkpoint_parallel_dimensions") or {}
        ranks = max(len(self._ranks), 1)
        self.original_tp_degree = len(self._layers) or (1 if self._is_ours else dimensions.get("tp_degree") or ranks)
        self.original_pp_degree = ranks // self.original_tp_degree
        optim = max((len(files.optim) for files in self._ranks), default=0)
        self.original_dp_degree = optim or int(first.get("dp_world_size") or 1)
        self.tp_degree = self._same("tp_degree", tp_degree, self.original_tp_degree)
        self.dp_degree = self._same("dp_degree", dp_degree, self.original_dp_degree)
        self.pp_degree = self.original_pp_degree if pp_degree is None else pp_degree
        self.original_world_size = self.original_tp_degree * self.original_pp_degree * self.original_dp_degree
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self._final_norm = final_layer_norm_idx
        if not self._layers and self.pp_degree != self.original_pp_degree:
            raise CheckpointError(f"{self.dir}: pp_degree={pp_degree}, expected {self.original_pp_degree}: no pipeline")

    def _same(self, name: str, requested: int | None, written: int) -> int:
        if requested is not None and requested != written:
            raise CheckpointError(
                f"DeepSpeedCheckpoint({self.dir!r}, {name}={requested}): expected {written}, as in the folder. "
                "Leave it out; engine.load_checkpoint reads the folder at any topology"
            )
        return written

    def is_change_tp_degree(self) -> bool:
        """Returns False: slices are not cut again."""
        return self.tp_degree != self.original_tp_degree

    def is_change_pp_degree(self) -> bool:
        """Returns whether the layers are divided over another number of stages than wrote them."""
        return self.pp_degree != self.original_pp_degree

    def is_change_dp_degree(self) -> bool:
        """Returns False: states of data-parallel ranks are not cut again."""
        return self.dp_degree != self.original_dp_degree

    # -- small values --------------------------------------------------------------------------------------------------

    def get_checkpoint_value(self, key: str) -> Any:
        """Returns an entry of :attr:`global_state`, or None."""
        return self.global_state.get(key)

    def get_iteration(self) -> int:
        """Returns Megatron's iteration; where there is none, the engine's updates."""
        return int(self.global_state.get(ITERATION_KEY, self.global_state.get("global_steps", 0)))

    def get_args(self) -> Any:
        """Returns Megatron's ``args``, or None."""
        return self.get_checkpoint_value(ARGS_KEY)

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Returns what a framework wrote about the checkpoint, or None."""
        return self.get_checkpoint_value(info_key)

    # -- states of ranks -----------------------------------------------------------------------------------------------

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Returns the model states of one tensor-parallel rank of one stage that wrote the folder.

        Of a folder of this package it is :attr:`global_state` with the full weights in ``module``.
        """
        rank = self._rank(tp_index, pp_index)
        if self._is_ours:
            with CheckpointReader(Path(self.dir)) as reader:
                return {**self.global_state, "module": full_tensors(reader)}
        return dict(self._load(self._ranks[rank].model[0]))

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Returns the optimizer-states files of one rank that wrote the folder; at most one.

        Raises:
            CheckpointError: The folder is one of this package, or has no such rank.
        """
        rank = self._rank(tp_index, pp_index)
        self._refuse_ours("files of ZeRO ranks", "use engine.load_checkpoint")
        self._check("dp_index", dp_index, self.original_dp_degree)
        optim = self._ranks[rank].optim
        return [str(optim[dp_index])] if optim else []

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """Returns one rank's optimizer states as in its file, cut to the masters with ``strip_tensor_paddings``.

        Raises:
            CheckpointError: As :meth:`get_zero_files`; or the run had no ZeRO optimizer.
        """
        files = self.get_zero_files(pp_index, tp_index, dp_index)
        if not files:
            raise CheckpointError(
                f"{self.dir}: there are no optimizer-states files (ZeRO stage 0, or no optimizer); read the model "
                "states only"
            )
        state: dict[str, Any] = self._load(Path(files[0]))
        if strip_tensor_paddings:
            _strip_paddings(state.get("optimizer_state_dict") or {})
        return state

    # -- layers of a pipeline ------------------------------------------------------------------------------------------

    def get_embedding_layer_id(self) -> str:
        """Returns the name of the first layer."""
        return self._key(0)

    def get_final_norm_layer_id(self) -> str:
        """Returns the name of the last norm."""
        return self._key(self._final_norm)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Returns the file of the first layer, in a list."""
        return [str(self._layer_file(tp_index, self.get_embedding_layer_id()))]

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Returns the file of the last norm, in a list."""
        return [str(self._layer_file(tp_index, self.get_final_norm_layer_id()))]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Returns the state dict of the first layer, as one tensor-parallel rank has it."""
        return dict(self._load(Path(self.get_embedding_files(tp_index)[0])))

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Returns the state dict of the last norm, as one tensor-parallel rank has it."""
        return dict(self._load(Path(self.get_final_norm_files(tp_index)[0])))

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Returns the names of the transformer layers of stage ``pp_index`` of ``pp_degree``; earlier ones have more.

        Raises:
            CheckpointError: There is no such stage, or there are fewer layers than stages.
        """
        self._check("pp_index", pp_index, self.pp_degree)
        self._key(0)
        inner = self.layer_keys[1 : self._final_norm]
        if len(inner) < self.pp_degree:
            raise CheckpointError(
                f"{self.dir}: pp_degree={self.pp_degree}: expected at most {len(inner)}, the number of layers in the "
                "checkpoint; choose a smaller pp_degree"
            )
        share, rest = divmod(len(inner), self.pp_degree)
        start = pp_index * share + min(pp_index, rest)
        return inner[start : start + share + (pp_index < rest)]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Returns the state dicts of the layers of a stage (:meth:`get_pp_transformer_map`), of one tensor rank."""
        keys = self.get_pp_transformer_map(pp_index)
        return [dict(self._load(self._layer_file(tp_index, key))) for key in keys]

    def validate_files(self) -> None:
        """Opens every file. Raises CheckpointError: a file is missing or damaged."""
        if self._is_ours:
            with CheckpointReader(Path(self.dir)) as reader:
                for record in reader.manifest.files:
                    reader.open_file(record.name)
            return
        paths = [path for files in self._ranks for path in (*files.model, *files.optim)]
        for path in (*paths, *(path for layers in self._layers for path in layers.values())):
            self._load(path)

    def _load(self, path: Path) -> Any:
        return load(path, trust=self._trust)

    def _key(self, index: int) -> str:
        self._refuse_ours("files of layers", "take the weights of get_2d_parallel_state(0, 0)['module']")
        if not -self.layer_count <= index < self.layer_count:
            raise CheckpointError(
                f"{self.dir}: expected files layer_NN-model_states.pt of a pipeline, found {self.layer_count}; take "
                "the weights of get_2d_parallel_state(tp_index, 0)['module']"
            )
        return self.layer_keys[index]

    def _layer_file(self, tp_index: int, key: str) -> Path:
        self._check("tp_index", tp_index, self.tp_degree)
        return self._layers[tp_index][int(key.removeprefix("layer_"))]

    def _rank(self, tp_index: int, pp_index: int) -> int:
        self._check("tp_index", tp_index, self.original_tp_degree)
        self._check("pp_index", pp_index, self.original_pp_degree)
        return pp_index * self.original_tp_degree + tp_index

    def _check(self, name: str, index: int, size: int) -> None:
        if not 0 <= index < size:
            raise CheckpointError(f"{self.dir}: {name}={index}, expected 0 to {size - 1}")

    def _refuse_ours(self, what: str, instead: str) -> None:
        if self._is_ours:
            raise CheckpointError(f"{self.dir}: a folder of this package has no {what}; {instead}")


def _tag_folder(path: Path) -> tuple[Path, Format]:
    kind = format_of(path)
    if kind is None:
        found = find(path, None)
        if found is None:
            raise CheckpointError(f"{path}: {what_exists(path)}; pass the folder of one tag")
        path, kind = found.folder, found.format
    if kind is Format.UNIVERSAL:
        raise CheckpointError(
            f"{path} is a converted folder (one file per parameter), which has no ranks; pass the folder it was "
            "converted from, or use engine.load_checkpoint"
        )
    return path, kind


def _strip_paddings(inner: dict[str, Any]) -> None:
    """Cuts the moments of stages 1 and 2 to the length of the masters of their group."""
    base = inner.get("base_optimizer_state")
    masters = inner.get("single_partition_of_fp32_groups") or []
    if not isinstance(base, dict):
        return
    for number, padding in enumerate(inner.get("group_paddings") or []):
        state = base.get("state", {}).get(number, {})
        for name, value in state.items():
            is_padded = isinstance(value, torch.Tensor) and value.numel() == masters[number].numel() + padding
            if is_padded and padding and value.dim() == 1:
                state[name] = value[:-padding].clone()


__all__ = [
    "ARGS_KEY",
    "CHECKPOINT_INFO_KEY",
    "FINAL_LAYER_NORM_INDEX",
    "ITERATION_KEY",
    "UNIVERSAL_CHECKPOINT_INFO",
    "DeepSpeedCheckpoint",
]
