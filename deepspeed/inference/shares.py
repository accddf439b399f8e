"""Writing a model that is cut over ranks as one file per rank, so that none of them ever has to hold it whole.

``non-tp.safetensors`` has what every rank has, ``tp_RR_00.safetensors`` the parts of rank RR, each with its place in
the whole tensor in the file's header, and ``ds_inference_config.json`` lists them; it is written last. Any number of
ranks reads them with ``init_inference(model, checkpoint=folder)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from deepspeed.comm.job.world import is_initialized, rank_in
from deepspeed.errors import CheckpointError
from deepspeed.inference.weight_files import DESCRIPTION, PARTS
from deepspeed.parallel.tensor.cutting import CutModel
from deepspeed.zero.tiling.parts import tile_of

_WHOLE = "non-tp.safetensors"


def save(model: nn.Module, folder: str, cut: CutModel | None, dtype: torch.dtype) -> None:
    """Writes the model's weights. Every rank must call it; ranks with the same part write it once.

    Args:
        model: Cut as ``cut`` says, or whole.
        folder: Made where it is missing.
        cut: What was done to the model; None: nothing.
        dtype: Of its weights, for the description.

    Raises:
        CheckpointError: A file cannot be written; on every rank that shares layers.
    """
    place, size = (cut.channel.rank, cut.channel.size) if cut is not None else (0, 1)
    rank = rank_in() if is_initialized() else 0
    failure: OSError | None = None
    try:
        if rank < size:  # the first group of ranks; others have the same
            _write(model, Path(folder), place, size)
    except OSError as error:
        failure = error
    if cut is not None:
        failed = torch.tensor([int(failure is not None)])
        gathered = cut.channel.transport.gather_small(
            failed, channel="call", label="whether parts of weights are written"
        )
        if failure is None and bool(gathered.any()):
            raise CheckpointError(f"init_inference: save_mp_checkpoint_path {folder}: another rank could not write")
    if failure is not None:
        raise CheckpointError(f"init_inference: save_mp_checkpoint_path {folder}: {failure}") from failure
    if rank == 0:
        _describe(Path(folder), size, dtype)


def _write(model: nn.Module, folder: Path, place: int, size: int) -> None:
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # tied to one that is there
        seen.add(id(tensor))
        part = tile_of(name, tuple(tensor.shape), -1, tensor).part
        if part is None:
            whole[name] = tensor.detach().contiguous().cpu()
            continue
        parts[name] = tensor.detach().contiguous().cpu()
        described[name] = {
            "shape": part.global_shape,
            "boxes": [(box.whole, box.tile, box.shape) for box in part.boxes],
        }
    folder.mkdir(parents=True, exist_ok=True)
    if place == 0:
        save_file(whole, folder / _WHOLE)
    if size > 1:
        save_file(parts, folder / _file_of(place), {PARTS: json.dumps(described)})


def _describe(folder: Path, size: int, dtype: torch.dtype) -> None:
    description = {
        "type": "ds_model",
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": size,
        "dtype": str(dtype).removeprefix("torch."),
        "checkpoints": {"non_tp": [_WHOLE], "tp": [_file_of(place) for place in range(size)] if size > 1 else []},
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2))


def _file_of(place: int) -> str:
    return f"tp_{place:02d}_00.safetensors"
