"""Tensor parallelism in inference: the same cuts as in training, from the configuration of ``init_inference``.

Each rank writes its part of a cut model into a file of its own, so that no rank holds the whole model.

``non-tp.safetensors`` has the tensors that every rank has, ``tp_RR_00.safetensors`` the parts of tensor rank RR, with a
header that states where each lies in the whole tensor. ``ds_inference_config.json`` lists the files; it is written
last. Any number of ranks reads them with ``init_inference(model, checkpoint=folder)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from deepspeed.axes import DATA, TENSOR
from deepspeed.comm import init_distributed
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job, is_initialized, rank_in, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config.sections.inference import InferenceTp
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.inference.config import InferenceSettings
from deepspeed.inference.weight_files import DESCRIPTION, PARTS
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.cutting import CutModel, cut_model
from deepspeed.parallel.tensor.request import tp_model_init
from deepspeed.parallel.tensor.rules import is_linear
from deepspeed.zero.tiling.parts import tile_of


def tensor_size(settings: InferenceSettings) -> int:
    """Returns the number of ranks that share every layer."""
    section = settings.config.tensor_parallel
    return section.tp_size if section.enabled else 1


def job_mesh(settings: InferenceSettings) -> Mesh | None:
    """Sets and returns the mesh of the job; returns None if no layer is shared. Every rank must call it.

    Ranks of one tensor-parallel group are consecutive. Each group has prompts of its own.

    Raises:
        DeepSpeedConfigError: ``tp_size`` does not divide the number of ranks.
    """
    size = tensor_size(settings)
    if size == 1:
        return None
    init_distributed()
    ranks = size_of()
    if ranks % size:
        raise DeepSpeedConfigError(
            f"init_inference: tensor_parallel.tp_size={size}: must divide the number of ranks ({ranks}); start a "
            f"multiple of {size} ranks"
        )
    mesh = Mesh(((DATA, ranks // size), (TENSOR, size)))
    groups.set_mesh(mesh)
    if ranks > size:
        log_dist(
            f"init_inference: {ranks // size} groups of {size} ranks; ranks of a group must bring the same prompts, "
            "groups may bring different ones",
            ranks=[0],
        )
    return mesh


def check_policy(model: nn.Module, settings: InferenceSettings) -> list[str] | None:
    """Returns the layers that the injection policy names, or None; DeepSpeedConfigError where one is missing."""
    read = settings.config
    if read.injection_policy is not None:
        return _layers_of_policy(model, read.injection_policy)
    return None if read.injection_policy_tuple is None else _check_layers(model, list(read.injection_policy_tuple))


def cut(model: nn.Module, settings: InferenceSettings, mesh: Mesh, device: torch.device) -> CutModel:
    """Cuts one model on every rank, which may be on the meta device; DeepSpeedConfigError where it cannot be cut so."""
    tp_config = settings.config.tensor_parallel
    section: dict[str, Any] = {"autotp_size": mesh.size(TENSOR)}
    if (rows := check_policy(model, settings)) is not None:
        section["injection_policy_tuple"] = rows
    if "tp_grain_size" in tp_config.model_fields_set:
        section["tensor_parallel"] = {"tp_grain_size": tp_config.tp_grain_size}
    if (group := _group_of(tp_config)) is not None:
        tp_model_init(model, mesh.size(TENSOR), tp_group=group)
    result = cut_model(Job.adopt(), model, TensorParallel(**section), mesh, device)
    assert result is not None, "the mesh has a tensor axis"
    return result


def _group_of(tp_config: InferenceTp) -> Any:
    if tp_config.tp_group is not None or tp_config.mpu is None:
        return tp_config.tp_group
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(tp_config.mpu, name):
            return getattr(tp_config.mpu, name)()
    raise DeepSpeedConfigError(
        f"init_inference: tensor_parallel.mpu: {type(tp_config.mpu).__name__} has no get_model_parallel_group(); give "
        "tensor_parallel.tp_group, or neither"
    )


def _layers_of_policy(model: nn.Module, policy: dict[Any, Any]) -> list[str]:
    """Returns the layers of a policy ``{class of a block: ends of names}``; DeepSpeedConfigError for none."""
    rows: list[str] = []
    for kind, ends in policy.items():
        shown = getattr(kind, "__name__", kind)
        ends = (ends,) if isinstance(ends, str) else ends
        if not isinstance(ends, (tuple, list)) or not all(isinstance(end, str) for end in ends):
            raise DeepSpeedConfigError(
                f"init_inference: injection_policy: {shown}: expected names of its layers, such as ('o_proj', "
                f"'down_proj'), found {ends!r}"
            )
        blocks = [name for name, module in model.named_modules() if kind in (type(module), type(module).__name__)]
        if not blocks:
            kinds = sorted({type(module).__name__ for module in model.modules() if list(module.children())})
            raise DeepSpeedConfigError(
                f"init_inference: injection_policy: the model has no {shown}; name one of {', '.join(kinds)}"
            )
        layers = [
            f"{block}.{name}" if block else name
            for block in blocks
            for name, module in model.get_submodule(block).named_modules()
            if is_linear(module)
        ]
        for end in ends:
            found = [layer for layer in layers if layer.endswith(f".{end}")]
            if not found:
                raise _no_layer("injection_policy", f"block {shown} of the model", end, layers)
            rows += found
    return rows


def _check_layers(model: nn.Module, ends: list[str]) -> list[str]:
    layers = [name for name, module in model.named_modules() if is_linear(module)]
    for end in ends:
        if not any(name == end or name.endswith(f".{end}") for name in layers):
            raise _no_layer("injection_policy_tuple", "module of the model", end, layers)
    return ends


def _no_layer(setting: str, where: str, end: str, layers: list[str]) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(
        f"init_inference: {setting}: no {where} has a linear layer {end!r}; its layers are "
        f"{', '.join(sorted({name.rpartition('.')[2] for name in layers}))}"
    )


_WHOLE = "non-tp.safetensors"


def save(model: nn.Module, folder: str, cut: CutModel | None, dtype: torch.dtype) -> None:
    """Writes the model's weights. Every rank must call it; ranks with the same part write it once.

    Args:
        model: Cut by ``cut``, or whole.
        cut: Describes how the model was cut; None: it was not.

    Raises:
        CheckpointError: A file cannot be written; raised on every rank that shares layers.
    """
    tensor_rank, size = (cut.channel.rank, cut.channel.size) if cut is not None else (0, 1)
    rank = rank_in() if is_initialized() else 0
    # The first group of ranks writes; others have the same.
    _write_together(lambda: _write(model, Path(folder), tensor_rank, size) if rank < size else None, folder, cut)
    _write_together(lambda: _describe(Path(folder), size, dtype) if rank == 0 else None, folder, cut)


def _write_together(write: Callable[[], None], folder: str, cut: CutModel | None) -> None:
    failure: OSError | SafetensorError | None = None
    try:
        write()
    except (OSError, SafetensorError) as error:  # the second is raised by save_file, for a full disk too
        failure = error
    if cut is not None:
        failed = torch.tensor([int(failure is not None)])
        gathered = cut.channel.transport.gather_small(
            failed, channel="call", label="whether parts of weights are written"
        )
        if failure is None and bool(gathered.any()):
            raise CheckpointError(
                f"init_inference: save_mp_checkpoint_path {folder}: another rank could not write; "
                "the message of that rank has the reason"
            )
    if failure is not None:
        raise CheckpointError(f"init_inference: save_mp_checkpoint_path {folder}: {failure}") from failure


def _write(model: nn.Module, folder: Path, tensor_rank: int, size: int) -> None:
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    seen: set[int] = set()
    storages: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # tied to a tensor that is written already
        seen.add(id(tensor))
        values = tensor.detach().contiguous().cpu()
        if values.untyped_storage().data_ptr() in storages:  # save_file refuses views of one memory
            values = values.clone()
        storages.add(values.untyped_storage().data_ptr())
        part = tile_of(name, tuple(tensor.shape), -1, tensor).part
        if part is None:
            whole[name] = values
            continue
        parts[name] = values
        described[name] = {
            "shape": part.global_shape,
            "boxes": [(region.whole, region.tile, region.shape) for region in part.regions],
        }
    folder.mkdir(parents=True, exist_ok=True)
    if tensor_rank == 0:
        save_file(whole, folder / _WHOLE)
    if size > 1:
        save_file(parts, folder / _file_of(tensor_rank), {PARTS: json.dumps(described)})


def _describe(folder: Path, size: int, dtype: torch.dtype) -> None:
    description = {
        "type": "ds_model",
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": size,
        "dtype": str(dtype).removeprefix("torch."),
        "checkpoints": {
            "non_tp": [_WHOLE],
            "tp": [_file_of(tensor_rank) for tensor_rank in range(size)] if size > 1 else [],
        },
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2))


def _file_of(tensor_rank: int) -> str:
    return f"tp_{tensor_rank:02d}_00.safetensors"
