"""Which device this process computes on, and which one its process group is bound to.

The device is chosen before any process group exists: torch's ``barrier`` and its object collectives use the current
device, and NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import CommunicationError

_BINDS = "cuda"  # the device type whose backend takes ``device_id``; for others torch does not document what it does


def local_device(index: int | None = None) -> torch.device:
    """Returns the device of this process, and makes it the current device.

    The first of these decides: ``index``, among the devices that this process sees; the device that the program has
    made current (``set_device``) or given to ``torch.distributed.init_process_group(device_id=...)``; ``LOCAL_RANK``.
    Where the process sees one device only, that is device 0, whatever the local rank (``srun --gpus-per-task=1``,
    ``CUDA_VISIBLE_DEVICES`` per process, MIG).

    Raises:
        CommunicationError: There is no such device, or the process group is bound to another one.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    bound = bound_device()
    chosen = index
    # Device 0 is current in every process from its start, so it counts as the program's choice only if it was set.
    if index is None and (accelerator.current_device() != 0 or accelerator.has_set_device):
        chosen = accelerator.current_device()
    if chosen is None and bound is not None:
        chosen = bound.index
    if chosen is None:
        chosen = device_index(os.environ, accelerator.device_count())
    elif index is not None:
        chosen = _checked(index, accelerator.device_count(), f"device_rank={index}")
    if bound is not None and bound.type == accelerator.device_name() and bound.index != chosen:
        raise CommunicationError(
            f"the process group is bound to {bound} (device_id of init_process_group), but this process uses "
            f"{accelerator.device_name(chosen)}. Call set_device before the process group is started, or give both "
            "the same device"
        )
    accelerator.set_device(chosen)
    return torch.device(accelerator.device_name(chosen))


def device_index(environ: Mapping[str, str], count: int) -> int:
    """Returns which of ``count`` devices ``LOCAL_RANK`` (0 where it is not set) gives this process.

    Raises:
        CommunicationError: ``LOCAL_RANK`` is no number of a visible device.
    """
    text = environ.get("LOCAL_RANK") or "0"
    if not text.isdecimal():
        raise CommunicationError(f"LOCAL_RANK={text!r}: must be a whole number from 0 on; correct the variable")
    return _checked(int(text), count, f"LOCAL_RANK={text}")


def _checked(index: int, count: int, source: str) -> int:
    if count == 1:
        return 0
    if not 0 <= index < count:
        raise CommunicationError(
            f"{source}: must be the number of a visible device, but this process sees {count} of them (0 to "
            f"{count - 1}). Start at most {count} processes on this machine, or show each process the one device that "
            f"it is to use ({next(iter(get_accelerator().visible_devices_envs()), 'the visible-device variable')})"
        )
    return index


def default_backend() -> str:
    """Returns the backend of the accelerator in use: ``nccl`` on GPUs, ``gloo`` on CPUs.

    Raises:
        CommunicationError: The accelerator has no backend.
    """
    name = get_accelerator().communication_backend_name()
    if name is None:
        raise CommunicationError(
            f"the accelerator {get_accelerator().device_name()!r} has no communication backend; give "
            "init_distributed a dist_backend (gloo works on host memory)"
        )
    return name


def serves_host_only(backend: str) -> bool:
    """Returns whether process groups of ``backend`` serve host memory only: ``gloo``, ``cpu:gloo``."""
    entries = [entry.strip() for entry in backend.lower().split(",")]
    return all(entry == "gloo" or entry.startswith("cpu:") for entry in entries)


def start_world_group(backend: str, device: torch.device | None, **arguments: Any) -> None:
    """Starts torch's default process group, bound to ``device`` where its backend wants that (None: it serves hosts).

    Torch numbers process groups, also one whose start has failed, and ranks meet at keys with that number. So the count
    starts over: ranks of which some have failed to start a group would otherwise wait at different keys. ``arguments``
    are further ones of ``torch.distributed.init_process_group``.
    """
    bound_to = device if device is not None and device.type == _BINDS else None
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0
    dist.init_process_group(backend, **arguments, device_id=bound_to)


def bound_device() -> torch.device | None:
    """Returns the device that the default process group is bound to; None if there is no group or no such device."""
    if not dist.is_initialized():
        return None
    found: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return found


@contextmanager
def unbound() -> Iterator[None]:
    """Makes torch create process groups inside as if the default group were bound to no device.

    Torch makes groups of a bound job by ``ncclCommSplit``, which every rank of the job must call, even for a gloo group
    and for one that only its members make; and it sends P2P messages through the whole group's communicator, in one
    order with its collectives, instead of a communicator per pair of ranks.
    """
    default: Any = dist.group.WORLD
    before = bound_device()
    if before is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = before
