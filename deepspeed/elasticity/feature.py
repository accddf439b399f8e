"""``elasticity.continue`` as a feature of the engine: checks the configuration, and starts the elastic run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from deepspeed.axes import TENSOR
from deepspeed.config.sections.optimizer import OWN_OPTIMIZERS
from deepspeed.elasticity.continuation import Continuation
from deepspeed.elasticity.elastic_run import ElasticRun
from deepspeed.engine_feature import (
    SEQUENCE_RANKS,
    STAGES,
    Conflict,
    ConflictKey,
    EngineFeature,
    EngineHooks,
    EngineSetup,
    UnevenBatch,
    refuse_conflicts,
)
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.tensor.request import group_was_given
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

_SETTING = "elasticity.continue"
_OWN = "deepspeed.elasticity.feature"
_RESTART = "leave elasticity.continue out and restart from checkpoints"


def _own_states(setup: EngineSetup) -> str | None:
    if setup.optimizer is not None:
        is_own = getattr(setup.optimizer, "_keeps_own_states", False)
        return f"with the optimizer {type(setup.optimizer).__name__}" if is_own else None
    kind = "" if setup.root.optimizer is None else setup.root.optimizer.type or ""
    is_own = kind in OWN_OPTIMIZERS and OWN_OPTIMIZERS[kind]._keeps_own_states
    return f"with the optimizer {kind}" if is_own else None


def _compressed(setup: EngineSetup) -> str | None:
    if setup.root.communication_compression.gradients is not None:
        return "with communication_compression.gradients"
    return "with zero_quantized_gradients" if setup.root.zero_optimization.zero_quantized_gradients else None


def _by_nodes(setup: EngineSetup) -> str | None:
    zero = setup.root.zero_optimization
    gathers = zero.stage == 3 and zero.mics_shard_size > 1 and zero.mics_hierarchical_params_gather
    return "with zero_optimization.mics_hierarchical_params_gather" if gathers else None


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
    conflicts = tuple(
        Conflict(_SETTING, lambda setup: True, *conflict)
        for conflict in (
            (STAGES, "the states of a stage have no copy on other ranks", _RESTART),
            (
                SEQUENCE_RANKS,
                "the states of ranks along this axis have no copy on other ranks",
                f"set sequence_parallel_size to 1, or {_RESTART}",
            ),
            (
                ConflictKey("optimizers with states of single ranks", _own_states),
                "it keeps rank-specific states, which are not copied",
                "use Adam, AdamW or another elementwise one",
            ),
            (
                ConflictKey("compressed gradients", _compressed),
                "the error-feedback residuals of every rank are not copied",
                "send gradients uncompressed",
            ),
            (
                ConflictKey("gathers by nodes", _by_nodes),
                "these gathers need equally many ranks on every node, which a loss changes",
                "leave the key out",
            ),
        )
    )
    goes_with = ("deepspeed.parallel.tensor.feature", "deepspeed.parallel.expert.feature")

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
        # if the program passed a function, the optimizer exists only now
        refuse_conflicts(self.conflicts, replace(engine._parts.setup, optimizer=engine.basic_optimizer))
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
    return _problem_of_axes(setup) or _problem_of_objects(setup)


def _problem_of_axes(setup: EngineSetup) -> str | None:
    """Returns which axes prevent continuing after a loss and what to change; None if none does."""
    mesh, zero = setup.ranks.mesh, setup.root.zero_optimization
    if not setup.mesh_is_ours:
        return (
            "an mpu has its own process groups, which are invalid after a loss; set the sizes of the axes in the "
            "configuration (tensor_parallel.autotp_size), and leave initialize(mpu=...) out"
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


def _problem_of_objects(setup: EngineSetup) -> str | None:
    root = setup.root
    if isinstance(setup.optimizer, torch.optim.Optimizer):
        return (
            "initialize(optimizer=...) was given an optimizer object, which cannot be used with another number of "
            "ranks; set the section `optimizer`, or give a function that makes the optimizer from parameters"
        )
    if setup.optimizer is None and (root.optimizer is None or root.optimizer.type is None):
        return "there is no optimizer, so nothing is trained; set the section `optimizer`, or leave it out"
    return None


FEATURE = ElasticRanks()
