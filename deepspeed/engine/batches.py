"""The sizes of batches, and the count of micro-steps by which updates are found."""

from __future__ import annotations

from deepspeed.config import BatchSizes
from deepspeed.errors import CallOrderError, DeepSpeedConfigError


class Batches:
    """Sizes of batches, and the count of micro-steps."""

    def __init__(self, sizes: BatchSizes, data_size: int, *, is_counted: bool) -> None:
        self._uneven_total = sizes.train_batch_size if sizes.is_uneven else None
        self._micro_batch_size = sizes.micro_batch_size
        self._accumulation_steps = sizes.accumulation_steps
        self._data_size = data_size
        self._is_counted = is_counted
        self.micro_steps = 0  # micro-batches so far
        self._counted_from = 0  # ``micro_steps`` from which on the present accumulation steps are counted

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

    def count_anew(self) -> None:
        """Makes the next micro-batch the first of an update."""
        self._counted_from = self.micro_steps
