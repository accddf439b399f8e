"""What a program sees of torch: tensors that say they are on a device, though their memory is the CPU's.

``Tensor.device`` answers from the checker's records. Functions that are requested a tensor on the device make one on
the CPU and enter it there. What has no meaning without a device (``record_stream``, page-locking) is noted. All of it
is put in the place of torch's own names, so it holds in every thread and inside autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.harness.device.memory import Memory
from tests.harness.device.operations import Operations
from tests.harness.device.places import Place

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")

_FACTORIES = (
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
_METHODS = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")


class _Generator(torch.Generator):
    """A generator of the device draws on the CPU, as everything does."""

    def __new__(cls, device: Any = HOST) -> _Generator:
        return super().__new__(cls, HOST if _requested_device(device) else device)


_FROM_HOST = ("tensor", "as_tensor", "new_tensor")


@contextmanager
def tensors_report_their_device(operations: Operations, memory: Memory) -> Iterator[None]:
    """Makes torch report the simulated device inside the block.

    Args:
        operations: Records what runs.
        memory: The checker's record of storages.
    """
    surface = _Surface(operations, memory)
    with torch.device("meta"):
        torch.empty(0)  # torch lists its factories at the first use of such a context, and keeps the list for good
    with ExitStack() as stack:
        for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
            for name in names:
                made = surface.factory(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, made))
        for name in ("to", "cpu", "cuda"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, surface.move(name)))
        for name in ("tolist", "numpy"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, surface.read(getattr(torch.Tensor, name), name)))
        for name, value in surface.attributes().items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (8, 0)))
        resize = surface.resize(torch.UntypedStorage.resize_)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        yield


def _requested_device(value: Any) -> bool | None:
    """Returns whether an argument names the device (True), the host (False) or something else (None)."""
    if not isinstance(value, (torch.device, str)):
        return None
    kind = value.type if isinstance(value, torch.device) else value.split(":")[0]
    return {"cuda": True, "cpu": False}.get(kind)


class _Surface:
    def __init__(self, operations: Operations, memory: Memory) -> None:
        self._operations = operations
        self._memory = memory

    def _block(self, tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return self._memory.know(tensor.untyped_storage(), on_device=False)

    def _pin(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self._memory.pin(tensor.untyped_storage())

    def factory(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, which may be requested the device or for locked pages."""

        @functools.wraps(real)
        def make(*args: Any, **kwargs: Any) -> Any:
            wanted = _requested_device(kwargs.get("device"))
            if wanted is None and "pin_memory" not in kwargs:
                return real(*args, **kwargs)
            if wanted is not None:
                kwargs["device"] = HOST
            locked = kwargs.pop("pin_memory", False)
            with self._operations.requested(wanted):
                made = real(*args, **kwargs)
            if wanted and real.__name__ in _FROM_HOST:
                self._memory.clocks.current.synchronize()  # values of ordinary pages
            if locked:
                self._pin(made)
            return made

        return make

    def move(self, name: str) -> Callable[..., torch.Tensor]:
        """``to`` and its kin: a copy where the device changes."""
        real = torch.Tensor.to

        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = {"cpu": False, "cuda": True}.get(name)
            rest = [] if wanted is not None else list(args)
            for index, value in enumerate(rest):
                on_device = _requested_device(value)
                if on_device is not None:
                    wanted, rest[index] = on_device, HOST
                elif isinstance(value, torch.Tensor):
                    wanted, rest[index : index + 1] = self._operations.is_on_device(value), [HOST, value.dtype]
            on_device = _requested_device(kwargs.get("device"))
            if on_device is not None:
                wanted, kwargs["device"] = on_device, HOST
            if wanted is None or tensor.is_meta or wanted == self._operations.is_on_device(tensor):
                return real(tensor, *rest, **kwargs) if rest or kwargs else tensor
            if not rest and "device" not in kwargs:
                rest = [HOST]
            with self._operations.requested(wanted):
                return real(tensor, *rest, **{**kwargs, "copy": True})

        return move

    def read(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``real``, with which the host reads a tensor."""

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            clocks = self._memory.clocks
            if self._operations.is_on_device(tensor):
                self._operations.touch(tensor, clocks.launch(), Place(name), writes=False)
                clocks.current.synchronize()
            else:
                self._operations.touch(tensor, clocks.host, Place(name), writes=False)
            return real(tensor, *args, **kwargs)

        return read

    def attributes(self) -> dict[str, Any]:
        """Attributes and methods of all tensors that a device answers."""
        real = torch._C.TensorBase.device
        operations = self._operations

        def device(tensor: torch.Tensor) -> torch.device:
            if operations.is_on_device(tensor):
                return DEVICE
            with torch._C.DisableTorchFunction():
                return real.__get__(tensor)  # type: ignore[attr-defined, no-any-return]

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            self._memory.lend(self._block(tensor), stream)

        def is_pinned(tensor: torch.Tensor, *_device: Any) -> bool:
            return bool(self._block(tensor).pages != "plain")

        def pin_memory(tensor: torch.Tensor, *_device: Any) -> torch.Tensor:
            if is_pinned(tensor):
                return tensor
            made = tensor.clone()
            self._pin(made)
            return made

        return {
            "device": property(device),
            "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
            "record_stream": record_stream,
            "is_pinned": is_pinned,
            "pin_memory": pin_memory,
        }

    def resize(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, which frees and allocates."""

        def resize(storage: Any, nbytes: int) -> Any:
            self._memory.resized(storage, nbytes)
            return real(storage, nbytes)

        return resize
