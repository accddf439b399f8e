"""The micro-batches of an update: their size and number, and the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.config import BatchSizes
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero.runtime import MicroBatch


class Batches:
    """Sizes of batches, and the count of micro-steps since the last update.

    Attributes:
        micro_steps: Micro-batches so far.
        has_run_backward: Whether a backward has run since the last update.
        defers_reduction: Whether a block of ``no_sync`` or ``coalesce_grad_reduction`` is open: backwards inside
            reduce no gradients.

    Args:
        sizes: The configured sizes.
        data_size: Data-parallel ranks.
        is_counted: Whether updates are found by counting micro-steps; otherwise each micro-step ends in one.
    """

    def __init__(self, sizes: BatchSizes, data_size: int, *, is_counted: bool) -> None:
        self._uneven_total = sizes.train_batch_size if sizes.is_uneven else None
        self._micro_batch_size = sizes.micro_batch_size
        self._accumulation_steps = sizes.accumulation_steps
        self._data_size = data_size
        self._is_counted = is_counted
        self.micro_steps = 0
        self.has_run_backward = False
        self.defers_reduction = False
        self._counted_from = 0  # ``micro_steps`` from which on the present accumulation steps are counted
        self._override: bool | None = None
        self._current: MicroBatch | None = None  # given by a schedule, until the next backward or step

    # -- sizes -------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Returns the samples per update over all ranks."""
        if self._uneven_total is not None:
            return self._uneven_total
        return self._micro_batch_size * self._accumulation_steps * self._data_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the samples per forward on one rank."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Returns the micro-batches per update."""
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns global batch, micro-batch and accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch and keeps the accumulation steps; the global batch follows.

        Raises:
            DeepSpeedConfigError: The size is not positive.
        """
        self._refuse_uneven("set_train_micro_batch_size")
        if micro_batch_size <= 0:
            raise DeepSpeedConfigError(f"set_train_micro_batch_size({micro_batch_size}): expected a positive number")
        self._micro_batch_size = micro_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the global batch by changing the accumulation steps; micro-steps since the last update count.

        Raises:
            DeepSpeedConfigError: It is not a multiple of micro-batch times ranks.
        """
        self._refuse_uneven("set_train_batch_size")
        per_pass = self._micro_batch_size * self._data_size
        if train_batch_size <= 0 or train_batch_size % per_pass:
            raise DeepSpeedConfigError(
                f"set_train_batch_size({train_batch_size}): expected a positive multiple of micro-batch "
                f"{self._micro_batch_size} x ranks {self._data_size} = {per_pass}"
            )
        self._counted_from = self.micro_steps - self.since_update
        self._accumulation_steps = train_batch_size // per_pass

    def _refuse_uneven(self, call: str) -> None:
        if self._uneven_total is not None:
            raise CallOrderError(
                f"{call}: with elasticity.continue the global batch stays {self._uneven_total} whatever the ranks; set "
                "train_batch_size and train_micro_batch_size_per_gpu in the configuration"
            )

    # -- where the training is ---------------------------------------------------------------------------------------

    @property
    def since_update(self) -> int:
        """Micro-steps since the last update, by counting."""
        return (self.micro_steps - self._counted_from) % self._accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the present micro-step ends in an update."""
        if self._current is not None:
            return self._current.is_last
        if self._override is not None:
            return self._override
        if not self._is_counted:
            return True
        return self.since_update + 1 == self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether micro-steps end in an update, until called again; steps are not counted meanwhile."""
        self._override = is_boundary

    @property
    def is_decided_outside(self) -> bool:
        """Returns whether the program or a schedule decides which micro-steps end in an update."""
        return self._override is not None or self._current is not None

    def set_current(self, micro_batch: MicroBatch | None) -> None:
        """Sets the micro-batch of the backward that begins; None: it is found by counting steps."""
        self._current = micro_batch

    def current(self) -> MicroBatch:
        """Returns the current micro-batch: set by a schedule, otherwise derived from the number of steps."""
        return self._current or MicroBatch(
            self.since_update,
            is_first=not self.has_run_backward,
            is_last=self.is_gradient_accumulation_boundary(),
        )

    def end_step(self, count: int = 1) -> None:
        """Counts the ``count`` micro-steps that one call of the engine's ``step`` ends."""
        self.micro_steps += count
        if self._current is not None and self._current.is_last:
            self._counted_from = self.micro_steps  # counting begins here again
        self._current = None

    def count_anew(self) -> None:
        """Makes the next micro-batch the first of an update."""
        self._counted_from = self.micro_steps

    @contextmanager
    def unreduced(self, call: str = "engine.no_sync") -> Iterator[None]:
        """Keeps backwards inside the block from reducing gradients; see :attr:`defers_reduction`.

        Args:
            call: Name of the method that the program called, for the message.

        Raises:
            CallOrderError: Such a block is open already.
        """
        if self.defers_reduction:
            raise CallOrderError(
                f"{call}: a block of no_sync or coalesce_grad_reduction is already open; do not nest them"
            )
        self.defers_reduction = True
        try:
            yield
        finally:
            self.defers_reduction = False
