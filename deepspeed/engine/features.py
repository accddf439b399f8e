"""The features of an engine: the list of all, the requested ones, and their hooks together.

A feature lives in its own subpackage (:class:`~deepspeed.engine_feature.EngineFeature`). Adding one adds a word to
:data:`FEATURES`, or the row of an axis to ``deepspeed/axes.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.axes import PIPE, ROWS, TENSOR
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config.section import features_of
from deepspeed.config.sections.autotuning import TUNING_VARIABLE
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import (
    EngineFeature,
    EngineHooks,
    EngineSetup,
    StepTracker,
    TrainingGroup,
    UnevenBatch,
    marks_of,
    refuse_conflicts,
)
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

_OF_AXES = {row.name: row.feature for row in ROWS}
FEATURES = (
    "deepspeed.parallel.pipe.feature",
    "deepspeed.data.curriculum.feature",
    "deepspeed.dropping.feature",
    "deepspeed.engine.generation",
    "deepspeed.engine.islands",
    "deepspeed.compression.feature",
    *(row.feature for row in ROWS if row.feature is not None and row.name != PIPE),
    "deepspeed.fast_path.float8",
    "deepspeed.fast_path.fused_loss",
    "deepspeed.fast_path.batch_invariant",
    "deepspeed.linear.feature",
    "deepspeed.ops.sparse_attention.feature",
    "deepspeed.activation_checkpointing.feature",
    "deepspeed.ops.muon.feature",
    "deepspeed.ops.onebit.feature",
    "deepspeed.data.batching.feature",
    "deepspeed.preemption.feature",
    "deepspeed.elasticity.feature",
    "deepspeed.run_report.feature",
    "deepspeed.profiling.feature",
    "deepspeed.autotuning.feature",
    "deepspeed.engine.deterministic",
)
"""Modules that have a ``FEATURE``, in the order in which features refuse and change a model."""

_OTHER_FORMS = ("deepspeed.parallel.pipe.transformers_models:names_in_other_form",)
"""Functions that map name prefixes of other forms of a model, which checkpoints may have, to its own; or {}."""


def feature_of(name: str) -> EngineFeature:
    """Imports one of :data:`FEATURES` and returns its feature."""
    feature: EngineFeature = importlib.import_module(name).FEATURE
    return feature


def renamings(model: nn.Module) -> list[dict[str, str]]:
    """Returns the mappings from name prefixes in checkpoints of other forms of ``model`` to its own."""
    return [names for function in _OTHER_FORMS if (names := resolve_name(function)(model))]


class FeatureSet:
    """The features that one engine requests, in the order of :data:`FEATURES`. Others are never imported."""

    def __init__(self) -> None:
        self._features: dict[str, EngineFeature] = {}

    def add_for_objects(self, *objects: Any) -> None:
        """Adds the features that a model, an mpu or an optimizer requests by its marks."""
        self._add(marks_of(*objects))

    def add_for_environment(self) -> None:
        """Adds the feature that ``deepspeed --autotuning`` requests through the environment."""
        if TUNING_VARIABLE in os.environ:
            self._add(["deepspeed.autotuning.feature"])

    def add_for_configuration(self, root: Root, mesh: Mesh, *, has_dtensors: bool = False) -> None:
        """Adds the features that sections of the configuration and axes of the job's mesh request."""
        axes = {axis for axis, size in mesh.axes if size > 1} | ({TENSOR} if has_dtensors else set())
        of_axes = [_OF_AXES.get(axis, axis) for axis in axes]
        self._add([*features_of(root), *(feature for feature in of_axes if feature is not None)])

    def _add(self, names: Iterable[str]) -> None:
        wanted = {*names, *self._features}
        if unknown := wanted.difference(FEATURES):
            raise LookupError(
                f"{', '.join(sorted(unknown))}: asked for, but not in FEATURES of {__name__}; add it there"
            )
        self._features = {name: self._features.get(name) or feature_of(name) for name in FEATURES if name in wanted}

    def read_config(self, config: Any, mpu: Any) -> Any:
        """Returns the configuration given to ``initialize``, as changed by the features that the mpu requests."""
        for feature in self._features.values():
            config = feature.read_config(config, mpu)
        return config

    def complete(self, root: Root, model: nn.Module, mpu: Any) -> Root:
        """Returns the configuration together with the program's settings of the model."""
        for feature in self._features.values():
            root = feature.complete(root, model, mpu)
        return root

    def refuse(self, setup: EngineSetup) -> None:
        """Lets features prepare the model's layers, then raises for what they do not support. Every rank must call it.

        The model's parameters are not changed yet.

        Raises:
            DeepSpeedConfigError: All conflicts between settings; if there are none, the first other problem.
        """
        prepared: set[str] = set()
        while new := {name: feature for name, feature in self._features.items() if name not in prepared}:
            refuse_conflicts([conflict for feature in new.values() for conflict in feature.conflicts], setup)
            for feature in new.values():
                feature.prepare(setup)
            prepared.update(new)
            self.add_for_objects(setup.model)  # the layers that features made may request further ones
        for feature in self._features.values():
            others = [] if feature.goes_with is None else self._others(feature, feature.goes_with)
            if others:
                raise DeepSpeedConfigError(
                    f"{feature.setting} with {', '.join(others)}: they are not supported together; leave one of the "
                    "two out"
                )
            feature.refuse(setup)

    def _others(self, feature: EngineFeature, goes_with: Sequence[str]) -> list[str]:
        return [
            other.title
            for name, other in self._features.items()
            if other is not feature and not other.only_watches and name not in goes_with
        ]

    def refuse_optimizer(self, setup: EngineSetup, optimizer: torch.optim.Optimizer | None) -> None:
        """Lets the features that an optimizer requests refuse it, where a callable of the program has made it.

        Raises:
            DeepSpeedConfigError: A feature does not support the optimizer.
        """
        setup = replace(setup, optimizer=optimizer)
        for name in sorted(marks_of(optimizer).difference(self._features)):
            feature = feature_of(name)
            refuse_conflicts(feature.conflicts, setup)
            feature.refuse(setup)

    def divide(self, setup: EngineSetup) -> TrainingGroup:
        """Returns the ranks that train together, among the data-parallel ranks. Every rank must call it."""
        groups = (feature.divide(setup) for feature in self._features.values())
        return next((found for found in groups if found is not None), TrainingGroup(setup.ranks, setup.ranks))

    def reshape(self, setup: EngineSetup) -> tuple[list[Mapping[int, nn.Parameter]], dict[str, bool]]:
        """Lets each feature change the model. Every rank must call it.

        Returns:
            Mappings, in order, from the ``id`` of a replaced parameter to the new one; and for each group of parameters
            that is sharded separately, by name, whether this rank counts in it.
        """
        exchanged = [feature.reshape(setup) for feature in self._features.values()]
        groups: dict[str, bool] = {}
        for feature in self._features.values():
            groups.update(feature.settle(setup))
        return exchanged, groups

    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> FeatureHooks:
        """Returns what the features do in the steps of an engine."""
        made = {name: feature.hooks(setup, runtime, groups, batch_size) for name, feature in self._features.items()}
        return FeatureHooks({name: hooks for name, hooks in made.items() if hooks is not None})

    def engine_class(self, setup: EngineSetup, ordinary: type[Any]) -> type[Any]:
        """Returns the class of the engine that a feature names, or ``ordinary``."""
        names = [feature.engine_class(setup) for feature in self._features.values()]
        name = next((name for name in names if name is not None), None)
        return ordinary if name is None else resolve_name(name)

    def finish(self, engine: Any, training_data: Any) -> None:
        """Calls each feature's ``finish``, which needs the engine. Every rank must call it."""
        for feature in self._features.values():
            feature.finish(engine, training_data)


class FeatureHooks(EngineHooks):
    """Runs the hooks of all features of one engine, in order."""

    def __init__(self, hooks: dict[str, EngineHooks]) -> None:
        self._hooks = hooks
        self.exposed = {name: value for each in hooks.values() for name, value in each.exposed.items()}
        self.states = {name: value for each in hooks.values() for name, value in each.states.items()}
        self.gathers_alike = all(each.gathers_alike for each in hooks.values())

    @property
    def trackers(self) -> list[StepTracker]:
        """The hooks that record the engine's phases and steps."""
        return [hooks.tracker for hooks in self._hooks.values() if hooks.tracker is not None]

    def get(self, name: str) -> Any:
        """Returns the hooks of the feature in the module ``name``; None where the engine has none of it."""
        return self._hooks.get(name)

    @property
    @override
    def needs_graph(self) -> bool:
        return any(hooks.needs_graph for hooks in self._hooks.values())

    @property
    @override
    def runs_backward(self) -> bool:
        return any(hooks.runs_backward for hooks in self._hooks.values())

    @property
    @override
    def uneven_batch(self) -> UnevenBatch | None:
        return next((batch for hooks in self._hooks.values() if (batch := hooks.uneven_batch) is not None), None)

    @override
    def before_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for hooks in self._hooks.values():
            keywords |= hooks.before_forward(
                is_training=is_training, global_steps=global_steps, micro_steps=micro_steps
            )
        return keywords

    @override
    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int) -> None:
        for hooks in self._hooks.values():
            hooks.before_backward(loss, scale, global_steps)

    @override
    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        for hooks in self._hooks.values():
            hooks.before_update(global_steps, has_run_backward=has_run_backward)

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        for hooks in self._hooks.values():
            hooks.after_update(global_steps, was_skipped=was_skipped)

    @override
    def after_step(self, global_steps: int) -> None:
        for hooks in self._hooks.values():
            hooks.after_step(global_steps)

    @override
    def close(self) -> None:
        for hooks in self._hooks.values():
            hooks.close()

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        for hooks in self._hooks.values():
            hooks.resume(global_steps, skipped_steps)

    @override
    def events(self) -> Sequence[tuple[str, float]]:
        return [event for hooks in self._hooks.values() for event in hooks.events()]
