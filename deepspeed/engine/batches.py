"""The sizes of batches, and which micro-batch of which update the next backward belongs to."""

from __future__ import annotations

from deepspeed.config import BatchSizes
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero.runtime import MicroBatch


class Batches:
    """Sizes of batches, and the count of micro-steps, by which updates are found unless a schedule says."""

    def __init__(self, sizes: BatchSizes, data_size: int, *, is_counted: bool) -> None:
        self._uneven_total = sizes.train_batch_size if sizes.is_uneven else None
        self._micro_batch_size = sizes.micro_batch_size
        self._accumulation_steps = sizes.accumulation_steps
        self._data_size = data_size
        self._is_counted = is_counted
        self.micro_steps = 0  # micro-batches so far
        self.global_steps = self.global_samples = 0  # updates, skipped ones included; their samples over all ranks
        self.skipped_steps = 0  # updates that were skipped because a gradient was not finite
        self._counted_from = 0  # ``micro_steps`` from which on the present accumulation steps are counted
        self.has_run_backward = False  # since the last update
        self.scheduled: MicroBatch | None = None  # the micro-batch that a schedule has given, until its step
        self.boundary: bool | None = None  # whether micro-steps end in an update, by the program; None: by counting

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

    # -- counting ----------------------------------------------------------------------------------------------------

    @property
    def since_update(self) -> int:
        """Micro-steps since the last update, by counting."""
        return (self.micro_steps - self._counted_from) % self._accumulation_steps

    @property
    def next_completes_update(self) -> bool:
        """Returns whether the next micro-step is the last of the accumulation steps of an update."""
        return not self._is_counted or self.since_update + 1 == self._accumulation_steps

    @property
    def counts_steps(self) -> bool:
        """Whether updates are found by counting steps, not by a schedule or the program."""
        return self.scheduled is None and self.boundary is None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the present micro-step ends in an update."""
        if self.scheduled is not None:
            return self.scheduled.is_last
        return self.next_completes_update if self.boundary is None else self.boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether micro-steps end in an update, until called again; steps are not counted meanwhile."""
        self.boundary = is_boundary

    def micro_batch(self) -> MicroBatch:
        """Returns the micro-batch of the next backward."""
        if self.scheduled is not None:
            return self.scheduled
        is_last = self.is_gradient_accumulation_boundary()
        return MicroBatch(self.since_update, is_first=not self.has_run_backward, is_last=is_last)

    def count_update(self, *, was_skipped: bool) -> None:
        """Counts an update and its samples."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.skipped_steps += was_skipped

    def end_step(self, micro_batches: int) -> None:
        """Counts the micro-batches of a step that has been made."""
        self.micro_steps += micro_batches
        if self.scheduled is not None and self.scheduled.is_last:
            self.count_anew()
        self.scheduled = None

    def count_anew(self) -> None:
        """Makes the next micro-batch the first of an update."""
        self._counted_from = self.micro_steps
