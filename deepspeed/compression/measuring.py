"""Eigenvalues of blocks at the updates that need them (``eigenvalue.enabled``): measured on the way to the backward."""

from __future__ import annotations

import torch

from deepspeed.comm.transports.transport import LocalTransport, Reduction, Transport, transfer_key
from deepspeed.compression.pacing import Pace
from deepspeed.errors import CallOrderError

_BUCKET = (1 << 15) - 2  # a number that no bucket has


class EnginePacing:
    """Measures eigenvalues for one engine.

    Args:
        pace: The model's.
        transport: Between the ranks that see other samples.

    Attributes:
        is_measuring: What goes through the graph now is no backward of the training.
    """

    def __init__(self, pace: Pace, transport: Transport) -> None:
        self._pace = pace
        self._transport = transport
        self._rounds = 0
        self._seen: int | None = None  # updates at the latest measurement
        self.is_measuring = False

    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int, updates: int) -> None:
        """Measures if the update after this backward needs it. Every rank must call it.

        Args:
            loss: 0-dim, as the backward gets it.
            scale: What the program's loss was multiplied by.
            global_steps: Updates so far.
            updates: Those that were not skipped.
        """
        if self._seen == global_steps or not self._pace.is_due(global_steps, updates):
            return
        self.is_measuring = True
        try:
            self._pace.measure(loss, scale, self._mean)
        finally:
            self.is_measuring = False
        self._seen = global_steps

    def before_update(self, global_steps: int, updates: int) -> None:
        """Raises where the engine has not seen the loss of an update that needs it.

        Raises:
            CallOrderError: The program ran the backward itself.
        """
        if self._seen != global_steps and self._pace.is_due(global_steps, updates):
            raise CallOrderError(
                "engine.step: eigenvalue.enabled needs the graph of the loss, which the engine has not seen: call "
                "engine.backward(loss) at the boundary instead of loss.backward(), or set eigenvalue.enabled to false"
            )

    def _mean(self, flat: torch.Tensor) -> torch.Tensor:
        transport = self._transport
        if isinstance(transport, LocalTransport):
            return flat
        numel = flat.numel()
        sent = torch.nn.functional.pad(flat, (0, -numel % (64 * transport.size)))
        mean = torch.empty_like(sent)
        self._rounds += 1
        key = transfer_key(transport.owner, _BUCKET, 1, self._rounds)
        how = Reduction(1.0 / transport.size, key, "a product with the Hessian", sent.numel())
        transport.all_reduce(sent, mean, how).wait()
        return mean[:numel]
