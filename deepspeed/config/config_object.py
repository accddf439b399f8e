"""``DeepSpeedConfig``: the object that programs build to read a configuration by upstream's attribute names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepspeed.config.batch import BatchSizes
from deepspeed.config.config_attribute import AttributeBuilder, ConfigAttribute
from deepspeed.config.degrees import data_parallel_size
from deepspeed.config.parsing import ParsedConfig, parse
from deepspeed.config.sections.optimizer import name_for_programs
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError


def _data_ranks(root: Root, mpu: Any, mesh_device: Any) -> int:
    """Returns the number of data-parallel ranks from ``mpu``, a device mesh, or environment and configuration."""
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    if mesh_device is not None:
        names = tuple(mesh_device.mesh_dim_names or ())
        return int(mesh_device.size(names.index("data_parallel") if "data_parallel" in names else None))
    return data_parallel_size(root, int(os.environ.get("WORLD_SIZE", "1") or 1))


_at = AttributeBuilder(lambda config: config.parsed.root)


def _size(
    key: str, read: Callable[[BatchSizes], int], change: Callable[[BatchSizes, int], BatchSizes], meaning: str
) -> ConfigAttribute[int]:
    """Returns an attribute of :class:`DeepSpeedConfig`: a size of the batch.

    A program may set it, and must keep the three sizes consistent.
    """

    def write(config: DeepSpeedConfig, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise DeepSpeedConfigError(f"DeepSpeedConfig.{key} = {value!r}: expected a positive integer")
        config._batch = change(config._batch, value)

    return ConfigAttribute(lambda config: read(config._batch), meaning, write)


class DeepSpeedConfig:
    """A checked configuration under the attribute names that programs read.

    It has no state besides ``parsed``; each attribute is one key of ``parsed.root``.

    Args:
        config: A dict, a path to an Hjson file, or URL-safe base64 of JSON.
        mpu: An object with ``get_data_parallel_world_size()``; decides the data-parallel size when given.
        mesh_device: A device mesh, whose axis ``data_parallel`` decides it otherwise. Without both: ``WORLD_SIZE`` and
            the degrees that the configuration requests.

    Raises:
        DeepSpeedConfigError: With every problem of the configuration.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.mpu = mpu
        self.mesh_device = mesh_device
        self.global_rank = int(os.environ.get("RANK", "0") or 0)
        self.parsed: ParsedConfig = parse(config, dp_world_size=lambda root: _data_ranks(root, mpu, mesh_device))
        assert self.parsed.batch is not None, "the number of ranks was given"
        self._batch = self.parsed.batch
        self.world_size = _data_ranks(self.parsed.root, mpu, mesh_device)
        self._param_dict = self.parsed.raw

    # Attributes whose upstream name differs from the key; all others are the key itself (see __getattr__).

    train_batch_size = _size(
        "train_batch_size",
        lambda batch: batch.train_batch_size,
        lambda batch, value: replace(batch, train_batch_size=value),
        "Samples per optimizer step of all data-parallel ranks.",
    )
    train_micro_batch_size_per_gpu = _size(
        "train_micro_batch_size_per_gpu",
        lambda batch: batch.micro_batch_size,
        lambda batch, value: replace(batch, micro_batch_size=value),
        "Samples of one forward pass.",
    )
    gradient_accumulation_steps = _size(
        "gradient_accumulation_steps",
        lambda batch: batch.accumulation_steps,
        lambda batch, value: replace(batch, accumulation_steps=value),
        "Micro-batches per optimizer step.",
    )
    zero_config = _at(lambda root: root.zero_optimization, "The section ``zero_optimization``.")
    zero_optimization_stage = _at(lambda root: root.zero_optimization.stage, "The ZeRO stage.")
    float16_config = _at(lambda root: root.fp16, "The section ``fp16``.")
    bfloat16_config = _at(lambda root: root.bf16, "The section ``bf16``.")
    fp16_enabled = _at(lambda root: root.fp16.enabled, "Whether the model trains in fp16.")
    bfloat16_enabled = _at(lambda root: root.bf16.enabled, "Whether the model trains in bf16.")
    fp16_auto_cast = _at(lambda root: root.fp16.auto_cast, "Whether inputs are cast to fp16.")
    grad_accum_dtype = _at(
        lambda root: root.data_types.grad_accum_dtype, "The type in which gradients are summed; None is fp32."
    )
    load_universal_checkpoint = _at(
        lambda root: root.checkpoint.load_universal, "Whether checkpoints are loaded in universal layout."
    )
    use_node_local_storage = _at(
        lambda root: root.checkpoint.use_node_local_storage, "Whether every node writes what it needs."
    )
    monitor_config = _at(lambda root: root, "Has ``tensorboard``, ``csv_monitor``, ``wandb``, ``comet``.")

    @property
    def zero_enabled(self) -> bool:
        """Whether the stage is above 0."""
        return self.zero_optimization_stage > 0

    @property
    def loss_scale(self) -> float:
        """The static loss scale, 0 when dynamic; 1 without fp16."""
        return self.parsed.root.fp16.loss_scale if self.parsed.root.fp16.enabled else 1.0

    @property
    def initial_dynamic_scale(self) -> float:
        """The value a dynamic loss scale starts at; 1 without fp16."""
        return 2.0**self.parsed.root.fp16.initial_scale_power if self.parsed.root.fp16.enabled else 1.0

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's name; upstream's own ones in small letters."""
        return name_for_programs(self.parsed.root.optimizer)

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments as given."""
        section = self.parsed.root.optimizer
        return section.params if section is not None else None

    @property
    def scheduler_name(self) -> str | None:
        """The schedule's name."""
        section = self.parsed.root.scheduler
        return section.type if section is not None else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """The schedule's arguments as given."""
        section = self.parsed.root.scheduler
        return section.params if section is not None else None

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the section ``elasticity`` chooses the batch."""
        return self.parsed.root.elasticity is not None and self.parsed.root.elasticity.enabled

    @property
    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether tags are compared across ranks."""
        return self.parsed.root.checkpoint.tag_validation != "Ignore"

    @property
    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether differing tags raise."""
        return self.parsed.root.checkpoint.tag_validation == "Fail"

    def __getattr__(self, name: str) -> Any:
        """Returns any other key of the top level, or a section under upstream's name ``<section>_config``.

        ``<section>_enabled`` of a section that may be left out is False then.
        """
        parsed = self.__dict__.get("parsed")
        if parsed is not None:
            if name in _SWITCHES:
                switched = getattr(parsed.root, _SWITCHES[name])
                return switched is not None and switched.enabled
            section = _SECTION_NAMES.get(name, name.removesuffix("_config"))
            for candidate in (name, section):
                if candidate in type(parsed.root).model_fields:
                    return getattr(parsed.root, candidate)
        raise AttributeError(f"the configuration has no key {name!r}")


_SWITCHES = {
    "amp_enabled": "amp",
    "curriculum_enabled_legacy": "curriculum_learning",
    "data_efficiency_enabled": "data_efficiency",
    "eigenvalue_enabled": "eigenvalue",
    "pld_enabled": "progressive_layer_drop",
}
_SECTION_NAMES = {
    "comms_config": "comms_logger",
    "sparse_gradients_enabled": "sparse_gradients",
    "zero_optimization_config": "zero_optimization",
}
