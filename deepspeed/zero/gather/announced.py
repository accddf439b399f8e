"""How a backward announces itself: at the outputs of the forward it goes through, whoever starts it.

The outermost forward of whatever module leaves a hook on what it returns (``zero.gather.hooks``). So a backward is open
before the first weight is needed, and it knows the forward whose outputs it came in through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.zero.gather.outputs import tensors_in


class Announcement:
    """Whether a backward of one model is open, and who is told when one shows itself.

    Attributes:
        is_open: Whether it is; set by the runtime alone.
        on_sight: Called when something of a backward is seen, whether one is open or not; opens it where none is.
        on_entry: Called in an open backward with the number of the forward whose outputs it has reached.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.on_sight: Callable[[], None] | None = None
        self.on_entry: Callable[[int], None] | None = None

    def watch(self, outputs: Any, entry: int = 0) -> None:
        """Lets a backward through what a training forward returned announce itself.

        Args:
            outputs: What it returned.
            entry: Number of the module among those that may be called by themselves; 0 is the model.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:  # on a parameter hooks would pile up, forward by forward
                tensor.register_hook(lambda _gradient: self._reached(entry))

    def seen(self) -> None:
        """Something of a backward is there that nobody has opened, or that is open."""
        if self.on_sight is not None:
            self.on_sight()

    def _reached(self, entry: int) -> None:
        self.seen()
        if self.is_open and self.on_entry is not None:
            self.on_entry(entry)
