"""Moving an engine's states off the device and back; the work is done by :mod:`deepspeed.offload`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from deepspeed.offload.states import StateTransfer

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts


class EngineOffload:
    """Moves the states of one engine.

    Args:
        parts: Of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to the host, at any stage; each rank its own.

        Until :meth:`reload_states` whatever needs a moved state raises: forward the parameters, ``step`` everything.
        Checkpoints can be saved meanwhile. States that offload keeps in host memory or in files stay there. Under fp32
        the parameters are their own masters and move with ``lp_params``.

        Args:
            include: Members of ``OffloadStateTypeEnum`` or their names; None is all: ``optim_states`` (optimizer
                state), ``hp_params`` (masters), ``lp_params`` (compute parameters), ``lp_grads`` (gradients that wait
                for the update), ``contiguous_grad_buffer`` (idle buffers, which are freed).
            device: ``OffloadDeviceEnum.cpu`` or ``"cpu"``.
            pin_memory: Page-lock the host memory, for faster copies.
            non_blocking: Queue the copies without waiting for each one; they are over when this method returns.

        Raises:
            ValueError: Another device, or an unknown kind.
            CallOrderError: A forward or backward is running.
        """
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f"offload_states(device={device!r}): states move to host memory only; use 'cpu'")
        self._mover().offload(include, pin=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what :meth:`offload_states` moved; does nothing if that is nothing.

        Args:
            non_blocking: Queue the copies without waiting for each one; they are over when this method returns.
        """
        self._mover().reload(non_blocking=non_blocking)

    def _mover(self) -> StateTransfer:
        return StateTransfer(self._parts.runtime, self._parts.torch_optimizer)
