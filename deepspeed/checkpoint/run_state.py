"""The state of an engine in a checkpoint, passed as one value, so that this package does not depend on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.config.sections.checkpoint import Checkpoint
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.tiling.parts import logical_name_of
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.update.updater import Updater

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


@dataclass
class RunState:
    """One training run on one rank."""

    model: nn.Module  # the wrapped model
    runtime: ZeroRuntime  # its sharded parameters
    updater: Updater | None  # updates the masters; None where nothing is trained
    lr_scheduler: Any  # the schedule, or None
    dataloader: Any  # the engine's own loader, or None
    counters: dict[str, int]  # values of :data:`COUNTERS`
    config: dict[str, Any]  # the configuration as the caller gave it
    settings: Checkpoint  # the ``checkpoint`` section
    precision: str  # ``fp32``, ``fp16`` or ``bf16``
    stage: int  # ZeRO stage
    dp_world_size: int  # ranks with the same part of the model, among which ZeRO shards
    model_size: int  # ranks with other parts of one copy of the model
    version: str  # the version of this package
    # objects of features with a ``state_dict``, by their key among ``checkpoint.states.FEATURE_KEYS``
    states: Mapping[str, Any] = field(default_factory=dict)
    use_fp32_weights: bool = True  # fill masters from saved masters, not from 16-bit values
    # returns beginnings of names in checkpoints of other kinds of this model, to its own
    renamings: Callable[[], Iterable[Mapping[str, str]]] = tuple

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer over runs, or None."""
        return self.updater.optimizer if self.updater is not None else None

    def schedule_state(self) -> dict[str, Any] | None:
        """Returns the state of the learning-rate schedule; None where there is none, or it has no state."""
        state_dict = getattr(self.lr_scheduler, "state_dict", None)
        return state_dict() if callable(state_dict) else None

    def settle(self) -> None:
        """Copies users' writes to resident parameters into buckets and masters, so that they are saved.

        Ranks whose weights differ synchronize. Every rank must call it.
        """
        self.runtime.originals.restore()
        if self.updater is not None:
            self.updater.carry_user_writes()
            self.updater.driver.synchronize()
        self.runtime.take_back_frozen()

    def sampler_state(self) -> dict[str, Any] | None:
        """Returns where a sampler stands that all ranks share, or None."""
        state = getattr(self.dataloader, "sampler_state", None)
        return state() if callable(state) else None

    def data_position(self) -> dict[str, Any] | None:
        """Returns the position of all ranks in the data, if it holds for any number of ranks; else None."""
        if self.dataloader is None:
            return None
        from deepspeed.data.positions import position_of  # only runs with a loader need it

        return position_of(self.dataloader)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the persistent buffers by their names in the whole model, each tensor once."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, buffer in self._named_buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = buffer
        return found

    def own_buffers(self) -> set[str]:
        """Returns the names of those buffers that other ranks of the same data-parallel group do not have."""
        places = self._own_places()
        return {name for name in self.buffers() if name.startswith(places)}

    def _own_places(self) -> tuple[str, ...]:
        """Returns the name prefixes of modules that other ranks of the same data-parallel group do not have."""
        return tuple(f"{name}." for module in self.model.modules() if (name := logical_name_of(module)) is not None)

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules with their names in the whole model."""
        logical: dict[str, str] = {}
        for place, module in self.model.named_modules(remove_duplicate=False):
            above, _, own = place.rpartition(".")
            prefix = logical_name_of(module) or (f"{logical.get(above, above)}.{own}" if above else own)
            logical[place] = prefix
            yield prefix, module

    def state_dict_names(self) -> Iterator[str]:
        """Returns the names of parameters and persistent buffers in state-dict order, tied ones each time."""
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            buffers = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
            for name in (*module._parameters, *buffers):
                if getattr(module, name) is not None:
                    yield f"{prefix}.{name}" if prefix else name

    def aliases(self) -> dict[str, str]:
        """Returns the further names of tied parameters and buffers, mapped to the name they are stored under."""
        logical = {tile.name: tile.logical for bucket in self.runtime.layout.buckets for tile in bucket.tiles}
        canonical = {id(parameter): name for parameter, name in self.runtime.param_names.items()}
        found = {
            name: logical[canonical[id(parameter)]]
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if canonical.get(id(parameter), name) != name
        }
        first: dict[int, str] = {}
        for name, buffer in self._named_buffers():
            if first.setdefault(id(buffer), name) != name:
                found[name] = first[id(buffer)]
        return found

    def extra_state_owners(self) -> dict[str, nn.Module]:
        """Returns the modules with a state of their own (``get_extra_state``), by key in the whole model."""
        default = nn.Module.get_extra_state
        return {
            f"{prefix}._extra_state" if prefix else "_extra_state": module
            for prefix, module in self._named_modules()
            if type(module).get_extra_state is not default
        }

    @property
    def num_groups(self) -> int:
        """Param groups of the optimizer."""
        return len(self.torch_optimizer.param_groups) if self.torch_optimizer is not None else 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every logical parameter of which this rank has a part."""
        return {tile.logical: tile.global_shape for bucket in self.runtime.layout.buckets for tile in bucket.tiles}

    @property
    def is_one_part(self) -> bool:
        """Returns whether the same ranks share every parameter, and there are no others."""
        return self.model_size == 1 and all(bucket.layout.group == DATA for bucket in self.runtime.buckets)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh's axes; states of single ranks can be restored on an equal mesh."""
        return {"data": self.dp_world_size, "model": self.model_size}

    def extra_state(self) -> dict[str, Any]:
        """Returns the extra state of modules, by state-dict key."""
        return {key: module.get_extra_state() for key, module in self.extra_state_owners().items()}

    def own_extra_state(self) -> dict[str, Any]:
        """Returns the extra state of those modules that other ranks of the same data-parallel group do not have."""
        owners, places = self.extra_state_owners(), self._own_places()
        return {key: module.get_extra_state() for key, module in owners.items() if key.startswith(places)}

    @property
    def is_pipeline(self) -> bool:
        """Returns whether the model's layers lie on several ranks, whose names differ."""
        return callable(getattr(self.model, "tied_layer_names", None))

    def layer_names(self) -> dict[int, str]:
        """Returns the name prefix of each tied layer of a pipeline, by layer number; empty without a pipeline."""
        names = getattr(self.model, "tied_layer_names", None)
        return names() if callable(names) else {}

    def trained_names(self) -> list[list[str]]:
        """Returns the names of the logical parameters of each param group, in the order of the model."""
        order = {name: position for position, name in enumerate(self.state_dict_names())}
        return [_names(sorted(tiles, key=lambda tile: order[tile.name])) for tiles in self._trained_tiles()]

    def group_names(self) -> list[list[str]]:
        """Returns the names of the logical parameters of each param group, in layout order."""
        return [_names(tiles) for tiles in self._trained_tiles()]

    def _trained_tiles(self) -> list[list[Tile]]:
        groups: list[list[Tile]] = [[] for _ in range(self.num_groups)]
        for master in self.runtime.masters:
            for tile in master.layout.tiles:
                if 0 <= tile.param_group < len(groups):
                    groups[tile.param_group].append(tile)
        return groups


def _names(tiles: Iterable[Tile]) -> list[str]:
    return list(dict.fromkeys(tile.logical for tile in tiles))
