"""Read-only queries of an engine by scripts and integrations: its ranks, optimizer, memory and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.axes import OTHER_PARTS
from deepspeed.comm.job import groups
from deepspeed.engine.batches import Batches
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.reports import memory_rows, precision_rows
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.access.whole_buckets import iter_full
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.update.updater import Updater


class EngineQueries:
    """Mixin of the engine: read-only queries."""

    _parts: EngineParts
    _batches: Batches
    _precision: PrecisionPolicy
    _runtime: ZeroRuntime
    _updater: Updater | None
    basic_optimizer: torch.optim.Optimizer | None
    mpu: Any

    # -- topology ----------------------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self._parts.coordinates.data_size

    @property
    def seq_dp_world_size(self) -> int:
        """Data- and sequence-parallel ranks together: those among which ZeRO shards."""
        return self._parts.coordinates.zero_size

    @property
    def mp_world_size(self) -> int:
        """Model-parallel ranks."""
        return self._parts.coordinates.model_size

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return self._parts.coordinates.sequence_size

    @property
    def seq_parallel_group(self) -> Any:
        """The torch process group of the ranks that share a sequence; None where none do."""
        return self._parts.coordinates.sequence_group

    @property
    def data_parallel_group(self) -> Any:
        """The torch process group of the data-parallel ranks; None for the default group."""
        return self._parts.coordinates.data_group

    @property
    def seq_data_parallel_group(self) -> Any:
        """The torch process group among which ZeRO shards; None for the default group."""
        return self._parts.coordinates.zero_group

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's number among the data-parallel ranks."""
        return self._parts.coordinates.data_rank

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's number among the model-parallel ranks: those of all stages that cut layers."""
        if self.mp_world_size == 1:
            return 0
        if self.mpu is None:
            return self._parts.coordinates.mesh.position(self._parts.global_rank, *OTHER_PARTS)
        return int(self.mpu.get_model_parallel_rank())

    def get_tensor_parallel_rank(self) -> int:
        """Returns this rank's number among those that share a layer."""
        return self._parts.coordinates.tensor_rank

    def get_sequence_parallel_group(self) -> Any:
        """Returns the torch process group of the ranks that share a sequence; None where none do."""
        return self._parts.coordinates.sequence_group

    # -- optimizer queries -------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each param group."""
        return [] if self.basic_optimizer is None else [group["lr"] for group in self.basic_optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Returns the momentum, or betas, of each param group."""
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group["momentum"] if "momentum" in group else group.get("betas", 0.0) for group in groups]

    def get_type(self) -> list[Any]:
        """Returns the ``type`` entry of each param group, 0.0 where there is none."""
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get("type", 0.0) for group in groups]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the compute dtype and the gradient accumulation dtype."""
        return self._precision.compute_dtype or torch.float32, self._precision.accumulate_dtype

    def get_global_grad_norm(self) -> float | None:
        """Returns the unscaled norm of the latest update's gradients, before clipping; None before the first."""
        if self._updater is None or self._updater.last_report is None:
            return None
        return self._updater.last_report.norm

    # -- parameters and memory ---------------------------------------------------------------------------------------

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """Parameter to qualified name."""
        return self._runtime.param_names

    def iter_full(self, kind: str = "param", bucket_bytes: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every full parameter, gradient or optimizer state. Every rank must go through all of it.

        One collective per bucket; where everything is on every rank, none.

        Args:
            kind: ``param`` (in the compute dtype), ``fp32`` (master weights; frozen parameters cast), ``grad`` (reduced
                and unscaled; between the last backward and the update), or a state's name, such as ``exp_avg``.
            bucket_bytes: Most bytes gathered at once; a larger bucket is read in parts. None: a bucket at a time.

        Yields:
            ``(qualified name, tensor of the full shape)`` in model order; parameters without the quantity are left out.
            A parameter that is cut over tensor-parallel ranks is yielded whole, and these ranks must take part. If it
            is unknown which ranks have the other parts (a program's own layers), this rank's part is yielded.
            The tensors of one bucket may share memory with each other, never with the model.
        """
        return iter_full(self._runtime, kind, bucket_bytes)

    def memory_report(self) -> list[tuple[str, int, int, str]]:
        """Returns the model-state bytes of this rank now: ``(kind, counted, by formula, formula)`` for each kind."""
        return memory_rows(self._runtime, self._updater, self._precision, self._batches.gradient_accumulation_steps())

    def precision_report(self) -> list[dict[str, Any]]:
        """Returns the dtypes per param group: ``compute``, ``accumulate``, ``reduce``, ``master`` and ``state``."""
        return precision_rows(
            self._runtime, self.basic_optimizer, self._precision, self._batches.gradient_accumulation_steps()
        )

    # -- mixture of experts ------------------------------------------------------------------------------------------

    @property
    def has_moe_layers(self) -> bool:
        """Returns whether the model has expert layers of this package."""
        return bool(self.moe_layers)

    @property
    def moe_layers(self) -> list[Any]:
        """The expert layers, in the order of the model."""
        return [module for module in self._parts.model.modules() if getattr(type(module), "_is_expert_layer", False)]

    @property
    def gate_modules(self) -> list[Any]:
        """Their gates."""
        return [layer.gate for layer in self.moe_layers]

    @property
    def num_experts(self) -> list[int]:
        """Their experts, of all ranks together."""
        return [layer.num_local_experts * layer.ep_size for layer in self.moe_layers]

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """The torch process groups of the ranks that share experts, by name ``ep_size_<n>``."""
        return groups._get_expert_parallel_group_dict()

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """The torch process groups of the ranks that hold the same experts, by name."""
        return groups._get_expert_data_parallel_group_dict()
