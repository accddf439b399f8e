"""``elasticity.continue`` as a feature of the engine: checks the configuration, and starts the elastic run."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from deepspeed.axes import DATA, EXPERT, TENSOR
from deepspeed.config.section import features_of
from deepspeed.config.sections.optimizer import OWN_OPTIMIZERS
from deepspeed.elasticity.continuation import Continuation
from deepspeed.elasticity.elastic_run import ElasticRun
from deepspeed.engine.features import feature_of
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, UnevenBatch, marks_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.tensor.request import group_was_given
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

_SETTING = "elasticity.continue"
_OWN = "deepspeed.elasticity.feature"
_GOES_WITH = (_OWN, "deepspeed.parallel.tensor.feature", "deepspeed.parallel.expert.feature")
_AXES = (DATA, EXPERT, TENSOR)


class ElasticHooks(EngineHooks):
    """Refuses updates outside of a step of ``ElasticSteps``, and records when a checkpoint is loaded."""

    def __init__(self) -> None:
        # continues the engine after a loss; None until the engine is built
        self.continuation: Continuation | None = None

    @property
    @override
    def uneven_batch(self) -> UnevenBatch | None:
        return None if self.continuation is None else self.continuation.step

    @override
    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        if self.continuation is not None:
            self.continuation.refuse_lone_update()

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        if self.continuation is not None:
            self.continuation.is_replaced = True


class ElasticRanks(EngineFeature):
    """Continues training when ranks are lost or join."""

    title = "ranks that come and go"
    setting = _SETTING

    @override
    def refuse(self, setup: EngineSetup) -> None:
        problem = _problem(setup)
        if problem is not None:
            raise DeepSpeedConfigError(f"{_SETTING}: {problem}")

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks:
        return ElasticHooks()

    @override
    def finish(self, engine: Any, training_data: Any) -> None:
        client = engine._parts.client
        if client.mesh_param is not None or group_was_given(client.model):
            what = "initialize(mesh_param=...)" if client.mesh_param is not None else "tp_model_init(tp_group=...)"
            raise DeepSpeedConfigError(
                f"{_SETTING}: {what} was given process groups or ranks of this job, which are invalid after a loss; "
                "set the sizes of the axes in the configuration (tensor_parallel.autotp_size)"
            )
        schedule = client.lr_scheduler
        if hasattr(schedule, "step") and not isinstance(schedule, type):
            raise DeepSpeedConfigError(
                f"{_SETTING}: initialize(lr_scheduler=...) was given a schedule object, which belongs to one "
                "optimizer; set the section `scheduler`, or give a function that makes the schedule from an optimizer"
            )
        optimizer = engine.basic_optimizer  # if the program passed a function, the optimizer exists only now
        if getattr(optimizer, "_keeps_own_states", False):
            raise DeepSpeedConfigError(f"{_SETTING}: {_own_states(type(optimizer).__name__)}")
        hooks: ElasticHooks = engine._hooks.get(_OWN)
        hooks.continuation = Continuation.open(engine)


def _problem(setup: EngineSetup) -> str | None:
    """Returns what prevents continuing after a loss and what to change; None if nothing does."""
    run = ElasticRun.of(setup.job)
    if run is not None and run.is_taken:
        return (
            "expected one engine with elasticity.continue in a process, found a second one while the first is in use. "
            "Leave elasticity.continue out of one of them, or call engine.destroy() on the first"
        )
    zero = setup.root.zero_optimization
    problem = _problem_of_axes(setup)
    if problem is not None:
        return problem
    if setup.has_stages:
        return (
            "a PipelineModule is not supported: the states of a stage have no copy on other ranks. Leave "
            "elasticity.continue out and restart from checkpoints"
        )
    if zero.stage == 3 and zero.mics_shard_size > 1 and zero.mics_hierarchical_params_gather:
        return (
            "zero_optimization.mics_hierarchical_params_gather needs equally many ranks on every node, which a loss "
            "changes; leave it out"
        )
    problem = _problem_of_objects(setup)
    if problem is not None:
        return problem
    requested = [feature_of(name) for name in _requested(setup) if name not in _GOES_WITH]
    others = [feature.title for feature in requested if not feature.only_watches]
    if others:
        return f"is not supported together with {', '.join(others)}; leave one of the two out"
    return None


def _problem_of_axes(setup: EngineSetup) -> str | None:
    """Returns which axes prevent continuing after a loss and what to change; None if none does."""
    mesh, zero = setup.ranks.mesh, setup.root.zero_optimization
    if not setup.mesh_is_ours:
        return (
            "an mpu has its own process groups, which are invalid after a loss; set the sizes of the axes in the "
            "configuration (tensor_parallel.autotp_size), and leave initialize(mpu=...) out"
        )
    others = [f"{axis} ({size} ranks)" for axis, size in mesh.axes if size > 1 and axis not in _AXES]
    if others:
        return (
            f"expected ranks along {', '.join(_AXES)}, found {', '.join(others)}. States of ranks along other "
            "axes have no copy; leave these axes out, or leave elasticity.continue out and restart from checkpoints"
        )
    size = mesh.size(TENSOR)
    if size > 1 and setup.root.tensor_parallel.autotp_size != size:
        return (
            f"expected a model that initialize makes tensor-parallel (tensor_parallel.autotp_size {size}), found one "
            "that the program has made so, whose process groups are fixed; set tensor_parallel.autotp_size, and pass "
            "the whole model to initialize"
        )
    if setup.root.use_data_before_expert_parallelism:
        return (
            "use_data_before_expert_parallelism makes the placement of experts depend on the number of ranks; leave "
            "it out, so that consecutive ranks share the experts of a layer"
        )
    if any(getattr(module, "ep_group", None) is not None for module in setup.model.modules()):
        return (
            "an expert layer was given the program's own process group, which is invalid after a loss; leave it out, "
            "and let initialize make the groups"
        )
    if size > 1 and zero.mics_shard_size > 1:
        return (
            f"zero_optimization.mics_shard_size {zero.mics_shard_size} is not supported with tensor-parallel ranks; "
            "leave it out"
        )
    return None


def _requested(setup: EngineSetup) -> list[str]:
    return sorted({*features_of(setup.root), *marks_of(setup.model, setup.optimizer)})


def _problem_of_objects(setup: EngineSetup) -> str | None:
    root = setup.root
    if isinstance(setup.optimizer, torch.optim.Optimizer):
        return (
            "initialize(optimizer=...) was given an optimizer object, which cannot be used with another number of "
            "ranks; set the section `optimizer`, or give a function that makes the optimizer from parameters"
        )
    if setup.optimizer is None and (root.optimizer is None or root.optimizer.type is None):
        return "there is no optimizer, so nothing is trained; set the section `optimizer`, or leave it out"
    kind = "" if root.optimizer is None else root.optimizer.type or ""
    if kind in OWN_OPTIMIZERS and OWN_OPTIMIZERS[kind]._keeps_own_states:
        return _own_states(kind)
    if root.zero_optimization.zero_quantized_gradients or root.communication_compression.gradients is not None:
        return "compressed gradients have error-feedback residuals on every rank, which are not copied; disable them"
    return None


def _own_states(optimizer: str) -> str:
    return (
        f"the optimizer {optimizer} keeps rank-specific states, which are not copied; use Adam, "
        "AdamW or another elementwise one"
    )


FEATURE = ElasticRanks()
