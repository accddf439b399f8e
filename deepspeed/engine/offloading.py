"""Moves an engine's states off the device and back, for phases in which something else needs its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import CallOrderError
from deepspeed.offload.pinned import host_tensor, may_pin
from deepspeed.zero.placement import Tier
from deepspeed.zero.runtime import ZeroRuntime

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts
    from deepspeed.engine.progress import ProgressLog


class SleepReport:
    """What ``engine.sleep`` freed. Leaving it as a context wakes the engine.

    Attributes:
        freed_bytes: Bytes of this rank that left the device; on a CPU they went from host memory to host memory.
    """

    def __init__(self, freed_bytes: int, wake: Callable[[], None]) -> None:
        self.freed_bytes = freed_bytes
        self._wake = wake

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wake()


class EngineOffload:
    """Moves the states of one engine."""

    def __init__(self, parts: EngineParts, progress: ProgressLog) -> None:
        self._parts = parts
        self._progress = progress

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to the host, at any stage; each rank its own.

        Until :meth:`reload_states` a call that needs a moved state raises: forward needs the parameters, ``step`` needs
        everything.
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
        """Brings back what :meth:`offload_states` moved, if anything."""
        self._mover().reload(non_blocking=non_blocking)

    def sleep(self, keep: Iterable[Any] = ()) -> SleepReport:
        """Moves every state but some kinds to the host until :meth:`wake`; does nothing where the engine sleeps.

        A call that needs a moved state raises meanwhile and says to wake the engine; checkpoints can be saved.

        Args:
            keep: Kinds of :meth:`offload_states` that stay on the device.

        Returns:
            What was freed; as a context manager it wakes the engine at its end.

        Raises:
            ValueError: An unknown kind.
            CallOrderError: A forward or backward is running.
        """
        if self._parts.runtime.offloaded:
            return SleepReport(0, lambda: None)
        kept = [str(getattr(kind, "value", kind)) for kind in keep]
        if unknown := [kind for kind in kept if kind not in KINDS]:
            raise ValueError(f"sleep(keep=...): expected kinds of {list(KINDS)}, found {unknown}; leave them out")
        before = self._device_bytes()
        self.offload_states([kind for kind in KINDS if kind not in kept])
        freed = before - self._device_bytes()
        self._progress.event("sleep", freed_bytes=freed)
        return SleepReport(freed, self.wake)

    def wake(self) -> None:
        """Brings back what :meth:`sleep` moved, if anything."""
        if self._parts.runtime.offloaded:
            self.reload_states()
            self._progress.event("wake")

    def _device_bytes(self) -> int:
        runtime = self._parts.runtime
        if runtime.updater is not None:
            runtime.updater.count_state()
        return runtime.memory_tracker.live_at(Tier.DEVICE)

    def _mover(self) -> StateTransfer:
        return StateTransfer(self._parts.runtime, self._parts.torch_optimizer)


OPTIMIZER_STATES = "optim_states"
MASTERS = "hp_params"
PARAMETERS = "lp_params"
GRADIENTS = "lp_grads"
GRADIENT_BUFFERS = "contiguous_grad_buffer"
KINDS = (OPTIMIZER_STATES, MASTERS, PARAMETERS, GRADIENTS, GRADIENT_BUFFERS)


class StateTransfer:
    """Moves states of one engine between the device and the host. What lives elsewhere already stays there.

    The tensors are replaced, not emptied: a state read while it is offloaded is read from the host copy.
    """

    def __init__(self, runtime: ZeroRuntime, optimizer: torch.optim.Optimizer | None) -> None:
        self._runtime = runtime
        self._optimizer = optimizer

    def offload(self, kinds: Iterable[str] | None, *, pin: bool, non_blocking: bool) -> None:
        """Moves states to the host.

        Args:
            kinds: Some of ``KINDS``; None is all.
            pin: Page-lock the host memory, for faster copies.
            non_blocking: Queue the copies without waiting for each one. They are over when this method returns all the
                same: the host may read what is away at any time.

        Raises:
            CallOrderError: A forward or backward is open.
            ValueError: A kind is unknown.
        """
        wanted = KINDS if kinds is None else tuple(str(getattr(kind, "value", kind)) for kind in kinds)
        unknown = [kind for kind in wanted if kind not in KINDS]
        if unknown:
            raise ValueError(f"offload_states(include=...): {unknown} are unknown; known are {list(KINDS)}")
        pin = may_pin(pin)

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            copy = host_tensor(tensor.numel(), tensor.dtype, pin=pin).view(tensor.shape)
            return copy.copy_(tensor, non_blocking=non_blocking)

        self._move([kind for kind in wanted if kind not in self._runtime.offloaded], to_host, Tier.HOST)
        self._runtime.offloaded.update(wanted)

    def reload(self, *, non_blocking: bool) -> None:
        """Brings everything back that :meth:`offload` moved."""
        device = self._runtime.device
        sources: list[torch.Tensor] = []  # kept until every copy is done: pages are unlocked with their last reference

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(tensor)
            with torch.inference_mode(False):
                return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=non_blocking)

        self._move(list(self._runtime.offloaded), to_device, Tier.DEVICE)
        self._runtime.offloaded.clear()

    @torch.no_grad()
    def _move(self, kinds: list[str], copy: Any, tier: Tier) -> None:
        runtime = self._runtime
        runtime.leave_backward("offload_states and reload_states")
        if runtime.reducer is not None:
            runtime.reducer.stop_reading()
        if runtime.passes.scopes:
            raise CallOrderError("offload_states and reload_states: a forward is running; call them after it")
        runtime.free_gathered()
        # A master that is not on the device stays there, but its compute tensors may move.
        masters = [master for master in runtime.masters if master.tier is Tier.DEVICE]
        if PARAMETERS in kinds:
            for bucket in runtime.buckets:
                if bucket.memory.tier is Tier.DEVICE:
                    bucket.relocate(copy, tier)
        for master in runtime.masters:
            master.relocate(copy if MASTERS in kinds and master.tier is Tier.DEVICE else None, tier)
        if OPTIMIZER_STATES in kinds and self._optimizer is not None:
            for master in masters:
                master.state_tier = tier
                for run in master.runs:
                    state = self._optimizer.state.get(run.param, {})
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.dim() > 0:
                            state[key] = copy(value)
        for gradients in runtime.reducer.buckets if runtime.reducer is not None else ():
            if GRADIENTS in kinds:
                gradients.sum.relocate(copy, tier)
            if GRADIENT_BUFFERS in kinds and tier is Tier.HOST:
                gradients.free_idle_buffer()
        if not runtime.host_is_device:
            get_accelerator().synchronize()
