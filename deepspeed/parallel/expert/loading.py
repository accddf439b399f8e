"""Loads mixture-of-experts models so that no rank ever holds more than its share and one layer.

The model is built on the meta device and its experts are cut before anything is read. Where a file has one tensor per
expert, only this rank's experts are read; where it has stacked tensors, only this rank's slice. Names and shapes in
files are converted to those of the model by the Transformers library. At ZeRO stage 3 a module is sharded as soon as it
is filled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deepspeed import comm
from deepspeed.comm.job.job import Job, rank_in, size_of
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.config import parse
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.models.building import build_without_values, read_configuration
from deepspeed.models.layers import initializer_of, lies_in, mark_initialized, modules_in_fp32
from deepspeed.models.stored import StoredTensors
from deepspeed.parallel.expert.auto import spread_experts
from deepspeed.parallel.expert.spread import Spread, rows_in, spread_of
from deepspeed.zero.construction.init import Init


def from_pretrained(
    folder: str | Path, config: Any, *, dtype: torch.dtype | None = None, model_class: Any = None
) -> nn.Module:
    """Returns a model of the Transformers library, on the host, with the experts of this rank only.

    Every rank of the job must call it.

    ::

        model = from_pretrained("mixtral", config)
        engine, *_ = deepspeed.initialize(model=model, config=config)

    Args:
        folder: A folder with ``config.json`` and ``*.safetensors``, from ``save_pretrained`` or the hub.
        config: The configuration that ``initialize`` gets, with ``expert_parallel`` enabled.
        dtype: The dtype of floating weights; None: as in the folder.
        model_class: A class of the library; None: ``AutoModelForCausalLM``.

    Raises:
        DeepSpeedConfigError: The section is not enabled, or the model's experts cannot be spread so.
        CheckpointError: Files are missing, damaged, or leave weights without a value.
    """
    if not comm.is_initialized():
        comm.init_distributed()
    root = parse(config, dp_world_size=size_of()).root
    section = root.expert_parallel
    if section is None or not section.enabled:
        raise DeepSpeedConfigError(
            "expert loading: the configuration has no enabled expert_parallel section; load the model by its own "
            "from_pretrained"
        )
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"expert loading: the folder {folder} has no *.safetensors; save the model by save_pretrained, or fetch it "
            "from the hub first"
        )
    described = read_configuration(folder)
    dtype = dtype or getattr(described, "dtype", None) or torch.get_default_dtype()
    model: nn.Module = build_without_values(described, model_class, dtype=dtype)
    data_first = root.use_data_before_expert_parallelism
    job = Job.adopt()
    spread_experts(job, model, section, LocalTransport(), torch.device("cpu"), data_first=data_first)
    stage_3 = functools.partial(Init, config_dict_or_path=config)
    shard = stage_3 if root.zero_optimization.stage == 3 else None
    _ModelFiller(job, model, files, shard).run()
    _make_buffers(model)
    return model


@dataclass
class _TargetWeight:
    """A weight of the model, or several that one conversion produces together."""

    name: str  # name of the first weight
    conversion: Any  # the library's conversion that produces it
    # by pattern: the file and the tensor's name in it
    sources: dict[str, list[tuple[Path, str]]] = field(default_factory=dict)


class _ModelFiller:
    """Fills a model on the meta device, whose experts have been cut, with values from files.

    ``shard`` is called with each module that owns weights once all of these are loaded.
    """

    def __init__(self, job: Job, model: Any, files: list[Path], shard: Callable[[nn.Module], Any] | None) -> None:
        self._job, self._model, self._files, self._shard = job, model, files, shard
        self._opened: dict[Path, Any] = {}
        self._empty: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, empty in model.state_dict(keep_vars=True).items():
            is_wide = lies_in(name, modules_in_fp32(model, empty.dtype))
            self._empty[name] = tuple(empty.shape), torch.float32 if is_wide else empty.dtype
        self._unknown: list[str] = []

    def run(self) -> None:
        """Loads all weights."""
        try:
            for target in self._targets():
                self._fill(target)
        except (SafetensorError, EOFError) as error:
            raise CheckpointError(
                f"expert loading: a file of {self._files[0].parent} is damaged ({error}); copy it again"
            ) from error
        tie = getattr(self._model, "tie_weights", None)
        if tie is not None:
            tie()
        missing = [name for name, p in self._model.named_parameters() if p.is_meta]
        if missing:
            also = (
                f"; {len(self._unknown)} tensors have no place, such as {self._unknown[0]!r}" if self._unknown else ""
            )
            raise CheckpointError(
                f"expert loading: {len(missing)} weights of {type(self._model).__name__} are in none of the "
                f"{len(self._files)} files of {self._files[0].parent}, such as {missing[0]!r}{also}; "
                "give the folder of this model, with all of its files"
            )
        for module in self._model.modules():  # modules that no file names, such as a head with a shared weight
            self._finished(module)

    def _targets(self) -> Iterator[_TargetWeight]:
        """Yields each weight with the tensors it is made from, in the order of the model's modules."""
        stored = StoredTensors(self._model)
        places = [(key, path) for path in self._files for key in self._open(path).keys()]  # noqa: SIM118
        targets: dict[str, _TargetWeight] = {}
        for key, path in sorted(places, key=lambda place: stored.order(place[0])):
            found = stored.target(key)
            if found is None:
                self._unknown.append(key)
                continue
            name, pattern = found
            if name not in targets:
                targets[name] = _TargetWeight(name, stored.conversion(key, name, pattern))
            targets[name].sources.setdefault(pattern or key, []).append((path, key))
        order = {name: number for number, name in enumerate(self._empty)}
        yield from sorted(targets.values(), key=lambda target: order[target.name])

    def _fill(self, target: _TargetWeight) -> None:
        owner = self._model.get_submodule(target.name.rpartition(".")[0])
        mine = _experts_of(self._job, owner)
        is_cut = False
        for pattern, sources in target.sources.items():
            chosen = sources
            if mine is not None and mine.cuts(len(sources)):
                chosen, is_cut = [sources[row] for low, high in mine.of(len(sources)) for row in range(low, high)], True
            for path, key in chosen:
                part, cut_here = self._read(path, key, None if is_cut or len(sources) > 1 else mine)
                is_cut = is_cut or cut_here
                target.conversion.add_tensor(target.name, key, pattern, lambda part=part: part)
        made = target.conversion.convert(target.name, model=self._model, config=self._model.config)
        for name, value in made.items():
            self._put(name, value[0] if isinstance(value, list) else value, mine)

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]

    def _read(self, path: Path, key: str, mine: _OwnRows | None) -> tuple[torch.Tensor, bool]:
        """Returns a tensor of a file, and whether it was reduced to this rank's experts."""
        found = self._open(path).get_slice(key)
        shape = found.get_shape()
        if mine is not None and len(shape) > 1 and mine.cuts(shape[0]):
            parts = [read_rows(found, slice(*interval)) for interval in mine.of(shape[0])]
            return torch.cat(parts) if len(parts) > 1 else parts[0], True
        return read_rows(found, slice(None)), False

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor, mine: _OwnRows | None) -> None:
        shape, old_dtype = self._empty[name]
        if mine is not None and value.dim() and mine.cuts(len(value)) and len(value) != shape[0]:
            value = rows_in(value, mine.of(len(value)))  # the file's layout did not allow reading less
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"expert loading: {name!r} has shape {list(value.shape)} in the files of {self._files[0].parent}, and "
                f"the model expects {list(shape)}. Build the model with the config.json of these weights"
            )
        value = value.to(old_dtype) if value.is_floating_point() else value
        place, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(place)
        if leaf not in owner._parameters:
            owner._buffers[leaf] = value
            return
        old = owner._parameters[leaf]
        made = nn.Parameter(value.contiguous(), requires_grad=old.requires_grad)
        made.__dict__.update(old.__dict__)  # attributes: which ranks share it, and which part it is
        owner._parameters[leaf] = made
        self._finished(owner)

    def _finished(self, owner: nn.Module) -> None:
        """Shards the parameters that a module owns once all of them are loaded."""
        own = [p for p in owner._parameters.values() if p is not None]
        if self._shard is not None and own and not any(p.is_meta for p in own):
            self._shard(owner)


@dataclass(frozen=True)
class _OwnRows:
    """The rows of a module's stacks that this rank keeps."""

    state: Spread
    place: int

    def cuts(self, rows: int) -> bool:
        """Returns whether a stack has this many rows on all ranks together."""
        return rows in self.state.rows.values()

    def of(self, rows: int) -> list[tuple[int, int]]:
        """Returns the intervals of a stack of ``rows``."""
        return self.state.intervals(rows, self.place)


def _experts_of(job: Job, module: nn.Module) -> _OwnRows | None:
    state = spread_of(module)
    if state is None or state.ep_size == 1:
        return None
    return _OwnRows(state, job.experts.ranks_of(state.ep_size)[0].index(rank_in()))


def read_rows(found: Any, rows: slice) -> torch.Tensor:
    """Returns the rows of a tensor in a file, as memory of this process."""
    part: torch.Tensor = found[rows] if found.get_shape() else found[...]
    return part


@torch.no_grad()
def _make_buffers(model: nn.Module) -> None:
    """Computes buffers that no file has, as the library does: by the model's initializer, or by a constructor.

    Raises:
        CheckpointError: A buffer can be computed by neither.
    """
    for name, module in model.named_modules():
        empty = [leaf for leaf, value in module._buffers.items() if value is not None and value.is_meta]
        if not empty:
            continue
        if getattr(module, "config", None) is not None:
            made: Any = type(module)(module.config)
            for leaf in empty:
                module._buffers[leaf] = made._buffers[leaf]
        elif not _initialize_buffers(model, name, empty):
            raise CheckpointError(
                f"expert loading: the buffers {', '.join(empty)} of {name!r} ({type(module).__name__}) are in no file, "
                "the module has no config to compute them from, and the model's _init_weights does not set them; load "
                "the model by its own from_pretrained"
            )


def _initialize_buffers(model: nn.Module, name: str, leaves: list[str]) -> bool:
    """Gives floating buffers of a module values by the ``_init_weights`` of the nearest model above it.

    Returns whether all of them got values; otherwise some are NaN.
    """
    module = model.get_submodule(name)
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
    initialize = next(filter(None, map(initializer_of, above)), None)
    buffers: list[torch.Tensor] = [getattr(module, leaf) for leaf in leaves]
    if initialize is None or not all(buffer.is_floating_point() for buffer in buffers):
        return False
    for leaf, buffer in zip(leaves, buffers, strict=True):
        module._buffers[leaf] = torch.full_like(buffer, torch.nan, device="cpu")
    for parameter in module.parameters(recurse=False):
        mark_initialized(parameter)  # it has the values of the files
    initialize(module)
    return not any(bool(getattr(module, leaf).isnan().any()) for leaf in leaves)
