"""An engine's optimizer without the update: rates, scales, states, and runs of this rank's masters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

from deepspeed.errors import CallOrderError
from deepspeed.ops.flat import FlatUpdate
from deepspeed.torch_private import storage_key
from deepspeed.uncompiled import torchs
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.update.base_optimizer import ZeROOptimizer
from deepspeed.zero.update.driver import UpdateDriver
from deepspeed.zero.update.masters import MasterBucket, MasterRun, PublishWork, cut_state, fragment_tables, split_state
from deepspeed.zero.update.run_gradients import MasterRunGradients
from deepspeed.zero.update.speculation import SpeculativeUpdater


class MasterOptimizer(ZeROOptimizer):
    """A torch optimizer whose parameters are the runs of masters: what programs read and set between updates.

    ``update.optimizer`` adds the update.

    Args:
        optimizer: The torch optimizer; its ``params`` lists hold runs already.
        masters: Master weights by trainable bucket.
        reducer: Where the gradients are.
        groups: The ranks that share masters, and those that decide together.
        driver: Exchanges what the update needs of other ranks.
        flat: The fused update of the torch optimizer; None if it has none.
        memory_tracker: Counts the bytes that are allocated.
        loss_scaler: fp16 loss scaler, or None.
        leave_backward: Refuses a call inside a backward, and drops what an exception has left of one.
        before_update: Frees what must not be gathered while parameters change.
        backward: The engine's backward, for ``optimizer.backward(loss)``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: list[MasterBucket],
        reducer: GradientReducer,
        *,
        groups: Groups,
        driver: UpdateDriver,
        flat: FlatUpdate | None,
        memory_tracker: MemoryTracker,
        loss_scaler: Any,
        leave_backward: Callable[[str], None],
        before_update: Callable[[], None],
        backward: Callable[..., Any],
    ) -> None:
        self.optimizer = optimizer
        self.driver = driver
        self.loss_scaler = loss_scaler
        self.speculation: SpeculativeUpdater | None = None
        self._masters = masters
        self._reducer = reducer
        self._groups = groups
        self._flat = flat
        self._memory_tracker = memory_tracker
        self._leave_backward = leave_backward
        self._before_update = before_update
        self._backward = backward
        self._update_by_losses: Callable[[], Any] | None = None
        self._offload: Callable[..., None] | None = None
        self._reload: Callable[..., None] | None = None
        self._steps = 0
        self._skipped_in_a_row = 0
        self._needs_fragments = callable(getattr(optimizer, "attach_segments", None))
        self._attach_segments()
        self._followed = _follow_zero_grad(optimizer, self.zero_grad)
        reducer.program.attach_runs(MasterRunGradients(masters))

    @property
    def loss_scale(self) -> float:
        """Factor on the loss: 1 unless fp16."""
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    cur_scale = loss_scale

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

    @property
    def steps(self) -> int:
        """Number of updates, skipped ones included; it decides the phase of the next one."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        self.driver.restart()
        self.driver.begin_update(count)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale follows the gradients."""
        return bool(getattr(self.loss_scaler, "dynamic", False))

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets the scale from now on; a dynamic one continues from there.

        Raises:
            CallOrderError: There is no loss scale.
        """
        if self.loss_scaler is None:
            raise CallOrderError("override_loss_scale: there is no loss scale; it exists only with fp16.enabled")
        before = self.loss_scale
        self.loss_scaler.cur_scale = float(loss_scale)
        self._reducer.scale_feedback(self.loss_scale / before)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every param group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Returns the learning rate of the first param group."""
        return self.param_groups[0]["lr"]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Runs the engine's backward of a 0-dim ``loss``."""
        self._backward(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards every gradient, reduced or not."""
        self._leave_backward("optimizer.zero_grad")
        self._reducer.zero_grad()

    # -- moves of states (deepspeed.engine.offloading), which programs also request here -------------------------------

    def attach_offloading(self, offload: Callable[..., None], reload: Callable[..., None]) -> None:
        """Connects the engine's methods ``offload_states`` and ``reload_states``."""
        self._offload, self._reload = offload, reload

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to the host, as the method of the engine with the same name and arguments."""
        assert self._offload is not None, "the engine has connected it"
        self._offload(include=include, device=device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what :meth:`offload_states` moved, as the method of the engine with the same name."""
        assert self._reload is not None, "the engine has connected it"
        self._reload(non_blocking=non_blocking)

    # -- losses that are sums (deepspeed.engine.train_step) ------------------------------------------------------------

    def attach_losses(self, update: Callable[[], Any], clear: Callable[[], None]) -> None:
        """Connects the counter of losses.

        Args:
            update: Computes the divisor of the gradients and calls :meth:`update` with it; ``step`` calls it.
            clear: Called when all gradients are discarded or were used.
        """
        self._update_by_losses = update
        self._reducer.on_clear = clear

    @property
    def mean_over(self) -> int:
        """Divisor of the sum over ranks of a gradient that all data-parallel ranks share."""
        return self._groups.by_name[DATA].divisor if self._reducer.policy.is_mean else 1

    @property
    def copies(self) -> int:
        """Ranks of the job that compute the same losses: those that hold other parts of the model."""
        return self._groups.job.size // self._groups.peers.size

    def gather_over_job(self, number: float, label: str) -> torch.Tensor:
        """Returns a number of every rank of the job, 1-D, fp64. Every rank must call it."""
        mine = torch.tensor([number], dtype=torch.float64)
        return self._groups.job.gather_small(mine, channel="call", label=label).view(-1)

    def scale_feedback(self, factor: float) -> None:
        """Multiplies the error feedback of reductions: the unit of gradients has changed."""
        self._reducer.scale_feedback(factor)

    def refresh_fp32_params(self) -> None:
        """Reads the masters again from the compute parameters (after they were loaded or written)."""
        for master in self._masters:
            master.refresh_all()
            master.bucket.remember_values()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's runs. For a file that other world sizes can read, save a checkpoint."""
        return {
            "optimizer": torchs(self.optimizer.state_dict)(),
            "loss_scaler": self.loss_scaler.state_dict() if self.loss_scaler is not None else None,
            "masters": [master.flat.clone() for master in self._masters],
            "runs": self._intervals_of_groups(),
            "skipped_in_a_row": self._skipped_in_a_row,
            "steps": self._steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any], **_ignored: Any) -> None:
        """Restores :meth:`state_dict` of a run with the same layout; group dicts stay the same objects.

        Every rank must call it.

        Raises:
            ValueError: The state is that of other param groups, buckets or ranks.
        """
        self._leave_backward("optimizer.load_state_dict")
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(self._state_of_present_runs(state_dict))
        for kept, loaded in zip(groups, self.optimizer.param_groups, strict=True):
            params = kept["params"]
            kept.update(loaded)
            kept["params"] = params
        self.optimizer.param_groups = groups
        if self.loss_scaler is not None and state_dict["loss_scaler"] is not None:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self._before_update()
        publishing = PublishWork(self._masters)
        for master, saved in zip(self._masters, state_dict["masters"], strict=True):
            master.flat.copy_(saved)
            master.publish()
            publishing.start(master)
        publishing.wait()
        self._skipped_in_a_row = state_dict["skipped_in_a_row"]
        self.steps = state_dict.get("steps", self._steps)  # earlier versions did not save it

    def _intervals_of_groups(self) -> list[list[tuple[int, int, int]]]:
        """Returns ``(master, start, stop)`` of every run, in the order of the params lists of the groups."""
        places = {
            id(run.param): (number, run.interval.start, run.interval.stop)
            for number, master in enumerate(self._masters)
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
        for number, master in enumerate(self._masters):
            labels.append([None] * len(master.layout.tiles))
            for run in master.runs:
                for tile, start, _ in master.tile_intervals(run.interval):
                    labels[number][tile] = origin(number, start)
        self.cut_runs(labels)
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
        present = (len(self.optimizer.param_groups), [master.flat.numel() for master in self._masters])
        if saved != present:
            raise ValueError(
                f"optimizer.load_state_dict: expected {present[0]} param groups and masters of {present[1]} elements, "
                f"found {saved[0]} and {saved[1]}; the state fits only this rank of a run with the same configuration "
                "and number of ranks. Use engine.save_checkpoint and engine.load_checkpoint, which fit any"
            )

    # -- what checkpoints need ---------------------------------------------------------------------------------------

    @property
    def flat_update(self) -> FlatUpdate | None:
        """The fused update of the torch optimizer, which also lists the state that a run needs; None if it has none."""
        return self._flat

    @property
    def skipped_in_a_row(self) -> int:
        """Updates skipped since the last one that was applied."""
        return self._skipped_in_a_row

    @skipped_in_a_row.setter
    def skipped_in_a_row(self, count: int) -> None:
        self._skipped_in_a_row = count

    def publish_masters(self) -> None:
        """Updates the compute parameters from masters that were written. Every rank that shares them must call it."""
        self._before_update()
        publishing = PublishWork(self._masters)
        for master in self._masters:
            master.publish()
            publishing.start(master)
        publishing.wait()

    def cut_runs(self, labels: Sequence[Sequence[Any]]) -> None:
        """Cuts runs until all parameters of a run have the same label. Every rank must call it.

        Needed where parameters that share a run must not share its scalar states (their step counts differ).

        Args:
            labels: For each master, a label for each tile of its bucket; compared by ``==``.
        """
        for master, of_tiles in zip(self._masters, labels, strict=True):
            for run in list(master.runs):
                cut = master.split(run, of_tiles)
                if len(cut) > 1:
                    self._replace_run(run, cut)
        self._attach_segments()

    def add_masters(self, masters: Sequence[MasterBucket]) -> None:
        """Adds the runs of newly trained parameters to their param groups. Every rank must call it.

        Args:
            masters: Their masters, already in the list of masters.
        """
        for master in masters:
            for run in master.runs:
                self.optimizer.param_groups[run.interval.param_group]["params"].append(run.param)
        if self.speculation is not None:
            self.speculation.add_masters()
        self._attach_segments()

    def destroy(self) -> None:
        """Frees the gradients and removes the gradient hooks from the model."""
        if vars(self.optimizer).get("zero_grad") is self._followed:
            del self.optimizer.zero_grad
        self._reducer.clear()
        self._reducer.remove()
        if self.speculation is not None:
            self.speculation.close()
        self.driver.end()

    def _replace_run(self, run: MasterRun, cut: list[MasterRun]) -> None:
        params = self.optimizer.param_groups[run.interval.param_group]["params"]
        position = next(index for index, param in enumerate(params) if param is run.param)
        params[position : position + 1] = [new.param for new in cut]
        state = self.optimizer.state.pop(run.param, None)
        if state:
            for new in cut:
                self.optimizer.state[new.param] = split_state(state, run, new)

    def _attach_segments(self) -> None:
        if self._needs_fragments:
            tables = fragment_tables(self._masters, self._groups.other_parts)
            self.optimizer.attach_segments(*tables)  # type: ignore[attr-defined]

    def count_state(self) -> int:
        """Returns the bytes of the optimizer's state on this rank, in all tiers.

        Also written into the memory tracker.
        """
        nbytes, seen = dict.fromkeys(Tier, 0), set[tuple[int, int]]()
        for master in self._masters:
            for run in master.runs:
                for value in self.optimizer.state.get(run.param, {}).values():
                    if not isinstance(value, torch.Tensor) or value.dim() == 0:
                        continue
                    place = (storage_key(value), int(value.storage_offset()))
                    if place not in seen:
                        seen.add(place)
                        self._memory_tracker.claim(value)
                        nbytes[master.state_tier] += value.numel() * value.element_size()
        for tier, counted in nbytes.items():
            self._memory_tracker.set(StorageKind.OPTIMIZER, tier, counted)
        return sum(nbytes.values())


def _follow_zero_grad(optimizer: torch.optim.Optimizer, discard: Callable[[], None]) -> Callable[..., None]:
    """Makes ``optimizer.zero_grad`` discard the engine's gradients too; its groups list runs, which have none.

    Args:
        discard: A bound method; its object is not kept alive.

    Returns:
        What stands in the place of the method now.
    """
    original, own = type(optimizer).zero_grad, weakref.WeakMethod(discard)

    @wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if (method := own()) is not None:
            method()
        original(optimizer, *args, **kwargs)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return zero_grad
