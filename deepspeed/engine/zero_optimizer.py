"""The optimizer that ``deepspeed.initialize`` returns: what programs call and read, on top of the training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from deepspeed.engine.forwarding import forwarded, forwarded_attribute
from deepspeed.engine.offloading import EngineOffload
from deepspeed.engine.train_step import TrainStep
from deepspeed.errors import CallOrderError, PipelineError
from deepspeed.ops.base import evaluate
from deepspeed.ops.elementwise import OptimizerKind, is_elementwise
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.uncompiled import torchs
from deepspeed.zero.access import states
from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.zero.placement import Placement
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.update.masters import cut_state
from deepspeed.zero.update.updater import FIXED_GROUPS, Updater


class DeepSpeedOptimizer:
    """Base class of what ``deepspeed.initialize`` returns as the optimizer; not a torch ``Optimizer``."""

    optimizer: torch.optim.Optimizer  # the torch optimizer underneath; its ``param_groups`` are live

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the torch optimizer; writing ``lr`` here takes effect."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the torch optimizer, by run."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the torch optimizer."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: parameters cannot be added.

        Raises:
            CallOrderError: Always.
        """
        raise CallOrderError(f"optimizer.add_param_group: {FIXED_GROUPS}")


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose states are placed by a ZeRO stage."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of an engine. Its updates are those of the engine's training step."""

    def __init__(self, runtime: ZeroRuntime, train_step: TrainStep, offloading: EngineOffload) -> None:
        assert runtime.updater is not None
        self._updater: Updater = runtime.updater
        self.optimizer = self._updater.optimizer
        # The sharded parameters; None below stage 3.
        self.parameter_offload = DeepSpeedZeRoOffload.of(runtime) if runtime.placement.shard_params else None
        self._runtime = runtime
        self._train_step = train_step
        self._offloading = offloading
        self._followed = _follow_zero_grad(self.optimizer, self.zero_grad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the whole update; every rank must call it. A non-finite gradient skips it everywhere.

        Args:
            closure: Recomputes the loss (it must call the engine's backward); evaluated once, before the update.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            CallOrderError: A backward is still open, or a parameter got no gradient and must have one.
            DivergenceError: Ranks kept different orders of collectives.
            NonFiniteError: Too many skipped steps in a row, or an overflow at the minimum loss scale.
        """
        loss = evaluate(closure)
        self._train_step.update_parameters()
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Runs the engine's backward of a 0-dim ``loss``.

        Raises:
            PipelineError: The engine is that of a pipeline.
        """
        if self._train_step.is_scheduled:
            raise PipelineError("optimizer.backward: a pipeline makes whole steps; call train_batch()")
        self._train_step.backward_of_loss(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards every gradient, reduced or not."""
        self._train_step.zero_grad("optimizer.zero_grad")

    offload_states = forwarded("_offloading", EngineOffload.offload_states)
    reload_states = forwarded("_offloading", EngineOffload.reload_states)

    # -- rates and scales --------------------------------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every param group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Returns the learning rate of the first param group."""
        return self.param_groups[0]["lr"]

    clip_grad = forwarded_attribute("_updater", "clip_grad", "Largest gradient norm, 0 for no clipping.")
    overflow = forwarded_attribute("_updater", "overflow", "Whether the latest update was skipped.")
    loss_scaler = forwarded_attribute("_updater", "loss_scaler", "The fp16 loss scaler, or None.")
    override_loss_scale = forwarded("_updater", Updater.override_loss_scale)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss: 1 unless fp16."""
        return self._updater.loss_scale

    cur_scale = loss_scale

    @property
    def _global_grad_norm(self) -> float:
        """The norm of the latest update, 0 before the first; programs such as BEiT and EVA read it here."""
        report = self._updater.last_report
        return 0.0 if report is None else report.norm

    @property
    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale follows the gradients."""
        return bool(getattr(self.loss_scaler, "dynamic", False))

    # The state of a dynamic loss scale, as programs read it from the optimizer; AttributeError without one.

    @property
    def cur_iter(self) -> int:
        """Steps that the dynamic loss scale has seen, skipped ones included."""
        return int(self.loss_scaler.cur_iter)

    @property
    def last_overflow_iter(self) -> int:
        """The last step that overflowed; -1 before any."""
        return int(self.loss_scaler.last_overflow_iter)

    @property
    def scale_window(self) -> int:
        """Good steps in a row before the dynamic loss scale grows."""
        return int(self.loss_scaler.scale_window)

    @property
    def scale_factor(self) -> float:
        """Factor by which the dynamic loss scale grows and shrinks."""
        return float(self.loss_scaler.scale_factor)

    # -- states ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's runs. For a file that other world sizes can read, save a checkpoint."""
        return {
            "optimizer": torchs(self.optimizer.state_dict)(),
            "loss_scaler": self._updater.loss_scaler.state_dict() if self._updater.loss_scaler is not None else None,
            "masters": [master.flat.clone() for master in self._updater.masters],
            "runs": self._intervals_of_groups(),
            "skipped_in_a_row": self._updater.skipped_in_a_row,
            "steps": self.steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any], **_ignored: Any) -> None:
        """Restores :meth:`state_dict` of a run with the same layout; group dicts stay the same objects.

        Every rank must call it.

        Raises:
            ValueError: The state is that of other param groups, buckets or ranks.
        """
        self._runtime.leave_backward("optimizer.load_state_dict")
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(self._state_of_present_runs(state_dict))
        for kept, loaded in zip(groups, self.optimizer.param_groups, strict=True):
            params = kept["params"]
            kept.update(loaded)
            kept["params"] = params
        self.optimizer.param_groups = groups
        if self._updater.loss_scaler is not None and state_dict["loss_scaler"] is not None:
            self._updater.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self._train_step.free_for_update()
        for master, saved in zip(self._updater.masters, state_dict["masters"], strict=True):
            master.flat.copy_(saved)
        self._updater.publish_masters()
        self._updater.skipped_in_a_row = state_dict["skipped_in_a_row"]
        self.steps = state_dict.get("steps", self.steps)  # earlier versions did not save it

    def _intervals_of_groups(self) -> list[list[tuple[int, int, int]]]:
        """Returns ``(master, start, stop)`` of every run, in the order of the params lists of the groups."""
        places = {
            id(run.param): (number, run.interval.start, run.interval.stop)
            for number, master in enumerate(self._updater.masters)
            for run in master.runs
        }
        return [[places[id(param)] for param in group["params"]] for group in self.optimizer.param_groups]

    def _state_of_present_runs(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the saved state of the torch optimizer, cut as the runs are.

        Updates cut runs where some parameters had no gradient, so there can be more of them now than when the state was
        saved, or fewer. Where the saved ones are shorter, those of now are cut first.
        """
        saved = state_dict["optimizer"]
        self._check_fits(state_dict)
        if "runs" not in state_dict:  # earlier versions did not save it
            return saved
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        intervals = [interval for of_group in state_dict["runs"] for interval in of_group]
        by_master: dict[int, list[tuple[int, int, int]]] = {}
        for index, (number, start, stop) in zip(indices, intervals, strict=True):
            by_master.setdefault(number, []).append((start, stop, index))

        def origin(number: int, start: int) -> tuple[int, int, int] | None:
            return next(
                (interval for interval in by_master.get(number, ()) if interval[0] <= start < interval[1]), None
            )

        labels: list[list[Any]] = []
        for number, master in enumerate(self._updater.masters):
            labels.append([None] * len(master.layout.tiles))
            for run in master.runs:
                for tile, start, _ in master.tile_intervals(run.interval):
                    labels[number][tile] = origin(number, start)
        self._updater.cut_runs(labels)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for group, of_group in zip(saved["param_groups"], self._intervals_of_groups(), strict=True):
            first = sum(len(made["params"]) for made in groups)
            groups.append({**group, "params": list(range(first, first + len(of_group)))})
            for position, (number, start, stop) in enumerate(of_group, first):
                found = origin(number, start)
                if found is not None and found[2] in saved["state"]:
                    begin, end, index = found
                    state[position] = cut_state(saved["state"][index], end - begin, start - begin, stop - start)
        return {**saved, "state": state, "param_groups": groups}

    def _check_fits(self, state_dict: dict[str, Any]) -> None:
        saved = (len(state_dict["optimizer"]["param_groups"]), [flat.numel() for flat in state_dict["masters"]])
        present = (len(self.optimizer.param_groups), [master.flat.numel() for master in self._updater.masters])
        if saved != present:
            raise ValueError(
                f"optimizer.load_state_dict: expected {present[0]} param groups and masters of {present[1]} elements, "
                f"found {saved[0]} and {saved[1]}; the state fits only this rank of a run with the same configuration "
                "and number of ranks. Use engine.save_checkpoint and engine.load_checkpoint, which fit any"
            )

    steps = forwarded_attribute("_updater", "steps", "Number of updates, skipped ones included.")
    skipped_in_a_row = forwarded_attribute("_updater", "skipped_in_a_row", "Updates skipped since the last one.")
    flat_update = forwarded_attribute("_updater", "flat_update", "The fused update of the torch optimizer, or None.")
    refresh_fp32_params = forwarded("_updater", Updater.refresh_fp32_params)
    carry_user_writes = forwarded("_updater", Updater.carry_user_writes)
    cut_runs = forwarded("_updater", Updater.cut_runs)
    add_masters = forwarded("_updater", Updater.add_masters)
    count_state = forwarded("_updater", Updater.count_state)

    def publish_masters(self) -> None:
        """Updates the compute parameters from masters that were written. Every rank that shares them must call it."""
        self._train_step.free_for_update()
        self._updater.publish_masters()

    def destroy(self) -> None:
        """Frees the gradients and removes the gradient hooks from the model."""
        if vars(self.optimizer).get("zero_grad") is self._followed:
            del self.optimizer.zero_grad
        self._updater.destroy()


def _follow_zero_grad(optimizer: torch.optim.Optimizer, discard: Callable[[], None]) -> Callable[..., None]:
    """Makes ``optimizer.zero_grad`` discard the engine's gradients too; returns what is in its place."""
    original, own = type(optimizer).zero_grad, weakref.WeakMethod(discard)

    @wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if (method := own()) is not None:
            method()
        original(optimizer, *args, **kwargs)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return zero_grad


class BF16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in bf16; a class of its own because programs test for it with ``isinstance``."""


class FP16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that works element by element."""


class FP16_UnfusedOptimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that needs whole tensors, such as LAMB."""


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 3; a class of its own because users and integrations import it.

    Its methods are other names of the functions in :mod:`deepspeed.zero.access.states`, which raise the same errors and
    say which ranks must call. ``optim_state_key`` None stands for the master weight.
    """

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Returns the fp32 master weight or an optimizer state, whole; None where the parameter is not trained."""
        if optim_state_key is None:
            return states.safe_get_full_fp32_param(param)
        return states.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Writes the master weight or an optimizer state, in the full shape."""
        if optim_state_key is None:
            states.safe_set_full_fp32_param(param, value)
        else:
            states.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Returns this rank's part of the master weight or of an optimizer state, 1-D, possibly empty."""
        if optim_state_key is None:
            return states.safe_get_local_fp32_param(param)
        return states.safe_get_local_optimizer_state(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Writes this rank's part of the master weight or of an optimizer state, in any shape."""
        if optim_state_key is None:
            states.safe_set_local_fp32_param(param, value)
        else:
            states.safe_set_local_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the reduced gradient, whole, without the loss scale; None where there is none."""
        return states.safe_get_full_grad(param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replaces the reduced gradient by ``value`` in the full shape, without the loss scale."""
        states.safe_set_full_grad(param, value)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the reduced gradient, 1-D, without the loss scale; None where there is none."""
        return states.safe_get_local_grad(param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replaces this rank's part of the reduced gradient (any shape), without the loss scale."""
        states.safe_set_local_grad(param, value)


def optimizer_class(
    optimizer: torch.optim.Optimizer, placement: Placement, precision: PrecisionPolicy
) -> type[DeepSpeedZeroOptimizer]:
    """Returns the optimizer class under the name that upstream uses at this stage; all behave the same."""
    if placement.shard_params:
        return DeepSpeedZeroOptimizer_Stage3
    if placement.shard_master or precision.name not in ("fp16", "bf16"):
        return DeepSpeedZeroOptimizer
    if precision.name == "bf16":
        return BF16_Optimizer
    is_whole = is_elementwise(optimizer).kind is not OptimizerKind.ELEMENTWISE
    return FP16_UnfusedOptimizer if is_whole else FP16_Optimizer
