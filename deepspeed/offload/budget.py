"""A limit on the device memory of model states, for trying out what offload makes possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.zero.storage import Ledger


@contextmanager
def device_budget(nbytes: int) -> Iterator[None]:
    """Engines made inside refuse to hold more than ``nbytes`` of model states on the device at once, ever after.

    Counted are compute parameters, gathered parameters, gradients, masters and optimizer state, as they are allocated;
    not activations.

    Args:
        nbytes: The limit in bytes per rank. Passing it raises ``MemoryBudgetError``.
    """
    before, Ledger.default_device_limit = Ledger.default_device_limit, nbytes
    try:
        yield
    finally:
        Ledger.default_device_limit = before
