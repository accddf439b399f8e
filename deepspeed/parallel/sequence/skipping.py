"""Accelerate's ``skip_first_batches`` for loaders whose batches are cut along the sequence.

It makes a new loader of the parts of a given one, which then cuts nothing: a Trainer that resumes in the middle of an
epoch would give its model whole batches. So it is taught to ask such loaders, wherever it was imported to.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MODULE, _NAME = "accelerate.data_loader", "skip_first_batches"


def teach_accelerate(cls: type) -> None:
    """Lets objects of ``cls`` skip by their method ``skipping(batches, skip)``; once, where Accelerate is loaded."""
    plain = getattr(sys.modules.get(_MODULE), _NAME, None)
    if plain is None or hasattr(plain, "_asks"):
        return

    @functools.wraps(plain)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, cls):
            return dataloader.skipping(num_batches, plain)  # type: ignore[attr-defined]
        return plain(dataloader, num_batches)

    skip_first_batches._asks = cls  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is plain:
            setattr(module, _NAME, skip_first_batches)
