"""A learning rate that follows the size of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.data.batching.packing import scale_lr
from deepspeed.schedulers.base import get_torch_optimizer, update_lr


class VariableBatchSizeLR:
    """Scales the rates of another schedule, or of an optimizer, by the size of the batch that comes next.

    Args:
        lr_scheduler: The schedule, or the optimizer whose rates are constant.
        base_batch_size: Samples of a batch at which the rates are those of the schedule.
        batch_sizes: Samples of each batch; after the last comes the first again.
        dataloader: Accepted for programs of old.
        lr_scaling_method: ``linear``, ``sqrt`` or ``none``.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
    ) -> None:
        is_schedule = hasattr(lr_scheduler, "step") and hasattr(lr_scheduler, "get_last_lr")
        self.base_lr_scheduler = lr_scheduler if is_schedule else None
        self.optimizer = get_torch_optimizer(lr_scheduler)
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method = lr_scaling_method
        self._number = 0  # of the batch that comes next
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._write()

    def _write(self) -> None:
        size = self.batch_sizes[self._number % len(self.batch_sizes)]
        factor = scale_lr(self.base_batch_size, size, method=self.lr_scaling_method)
        self._last = update_lr(self.optimizer.param_groups, [rate * factor for rate in self._unscaled])

    def get_last_lr(self) -> list[float]:
        """Returns the rates written last."""
        return self._last

    def get_lr(self) -> list[float]:
        """Returns the same."""
        return self._last

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Goes to the next batch; arguments are those of the schedule underneath."""
        update_lr(self.optimizer.param_groups, self._unscaled)  # some schedules go on from the rates they find
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.step(*args, **kwargs)
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._number += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the batch that comes next, the rates before scaling, and the schedule underneath."""
        inner = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        return {"batch": self._number, "unscaled": list(self._unscaled), "base": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to where :meth:`state_dict` was."""
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base"])
        self._number, self._unscaled = state_dict["batch"], list(state_dict["unscaled"])
        self._write()
