"""The interface of an accelerator, and its implementation for devices whose torch module is like ``torch.cuda``.

Other kinds of devices override methods. An index is the number of a device in this process (after the visible-device
variable); None is the current device. Memory is in bytes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NoReturn

import torch

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError

Index = int | str | None


def _typed_tensor(dtype: torch.dtype, kind: str) -> property:
    """Returns an attribute of an accelerator: what builds tensors of one dtype."""
    return property(lambda device: device._tensor_type(dtype), doc=f"Builds {kind} tensor on this device from data.")


class DeepSpeedAccelerator:
    """One kind of device.

    Constructing an accelerator starts no device context; the first call that needs the device does.

    Args:
        name: The device type as torch spells it (``"cuda"``, ``"cpu"``, ``"xpu"``, ...).
        communication_backend: The backend name for process groups on this device; None if there is none.
    """

    def __init__(self, name: str, communication_backend: str | None) -> None:
        self._name = name
        self._communication_backend_name = communication_backend
        self._compile_backend = "inductor"
        self._has_set_device = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def _module(self) -> ModuleType:
        return torch.get_device_module(self._name)

    def _call(self, function: str, *args: Any) -> Any:
        found = getattr(self._module, function, None)
        if found is None:
            raise NotYetSupportedError(
                f"torch.{self._name} of torch {torch.__version__} has no {function}(); use a torch that has it"
            )
        return found(*args)

    # --- device -----------------------------------------------------------------------------------------------------

    def device_name(self, index: Index = None) -> str:
        """Returns the device string: ``"cuda"`` without an index, ``"cuda:1"`` with one (an int or its text)."""
        return self._name if index is None else f"{self._name}:{index}"

    def device(self, index: Index = None) -> AbstractContextManager[Any]:
        """Returns a context in which ``index`` is the current device."""
        return self._call("device", index)

    def set_device(self, index: int) -> None:
        """Makes ``index`` the current device of this process."""
        self._call("set_device", index)
        self._has_set_device = True

    @property
    def has_set_device(self) -> bool:
        """Whether :meth:`set_device` was called in this process; False where there is only one device."""
        return self._has_set_device

    def current_device(self) -> int:
        """Returns the number of the current device."""
        return int(self._call("current_device"))

    def current_device_name(self) -> str:
        """Returns the device string of the current device, with its number."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Returns the number of devices of this kind that this process sees."""
        return int(self._call("device_count"))

    def synchronize(self, index: Index = None) -> None:
        """Blocks until all work queued on the device is done."""
        self._call("synchronize", index)

    def is_available(self) -> bool:
        """Returns whether at least one device of this kind can be used."""
        return bool(self._call("is_available"))

    @property
    def computes_in_host_memory(self) -> bool:
        """Whether the device's memory is the host's, so that nothing has to be copied between the two."""
        return self._name == "cpu"

    def shares_host_memory(self, device: torch.device) -> bool:
        """Returns whether tensors on ``device`` lie in the host's memory."""
        return device.type == "cpu" or (self.computes_in_host_memory and device.type == self._name)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` (any shape) lies on a device of this kind."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str | None:
        """Returns the backend name for process groups on this device (``nccl``, ``gloo``, ...)."""
        return self._communication_backend_name

    # --- random -----------------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """Returns the module ``torch.random``."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seeds the generator of the current device."""
        self._call("manual_seed", seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the generators of all devices that this process sees."""
        self._call("manual_seed_all", seed)

    def initial_seed(self) -> int:
        """Returns the seed that the current device's generator started from."""
        return int(self._call("initial_seed"))

    def get_rng_state(self, index: Index = None) -> torch.Tensor:
        """Returns the generator's state, a uint8 tensor on the host."""
        return self._call("get_rng_state", *self._index_arguments(index))

    def _index_arguments(self, index: Index) -> tuple[Any, ...]:
        """Returns the index as arguments, none for the current device: two functions do not accept None."""
        return () if index is None else (self.device_name(index),)

    def set_rng_state(self, state: torch.Tensor, index: Index = None) -> None:
        """Restores the state that :meth:`get_rng_state` returned, a 1-D uint8 tensor."""
        self._call("set_rng_state", state, *self._index_arguments(index))

    def default_generator(self, index: int) -> torch.Generator:
        """Returns the generator of device ``index``; starts the device context, which creates the generators."""
        self._call("init")
        return self._module.default_generators[index]

    # --- streams ----------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class."""
        return self._module.Stream

    @property
    def Event(self) -> Any:
        """The event class."""
        return self._module.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which work is queued on ``stream``."""
        return self._call("stream", stream)

    def current_stream(self, index: Index = None) -> Any:
        """Returns the current stream."""
        return self._call("current_stream", index)

    def default_stream(self, index: Index = None) -> Any:
        """Returns the device's default stream."""
        return self._call("default_stream", index)

    # --- memory -----------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Returns cached, unused device memory to the system."""
        self._call("empty_cache")

    def memory_allocated(self, index: Index = None) -> int:
        """Returns the bytes of all live tensors; on the CPU the resident memory of this process."""
        return int(self._call("memory_allocated", index))

    def max_memory_allocated(self, index: Index = None) -> int:
        """Returns the peak of :meth:`memory_allocated` since the start or the last reset."""
        return int(self._call("max_memory_allocated", index))

    def memory_reserved(self, index: Index = None) -> int:
        """Returns the bytes that the allocator holds, cached blocks included."""
        return int(self._call("memory_reserved", index))

    def max_memory_reserved(self, index: Index = None) -> int:
        """Returns the peak of :meth:`memory_reserved` since the start or the last reset."""
        return int(self._call("max_memory_reserved", index))

    def memory_stats(self, index: Index = None) -> dict[str, Any]:
        """Returns the allocator's figures.

        At least ``allocated_bytes.all.current`` and ``allocated_bytes.all.peak``.
        """
        return dict(self._call("memory_stats", index))

    def reset_peak_memory_stats(self, index: Index = None) -> None:
        """Resets the peaks to the current values."""
        self._call("reset_peak_memory_stats", index)

    def total_memory(self, index: Index = None) -> int:
        """Returns the size of the device's memory; on the CPU the RAM that this process may use."""
        return int(self._call("mem_get_info", index)[1])

    def available_memory(self, index: Index = None) -> int:
        """Returns the bytes that could still be allocated: those that are free or that the allocator holds unused."""
        unused = self.memory_reserved(index) - self.memory_allocated(index)
        return int(self._call("mem_get_info", index)[0]) + unused

    def memory_cached(self, index: Index = None) -> int:
        """Returns the same as :meth:`memory_reserved`, under its older name."""
        return self.memory_reserved(index)

    def max_memory_cached(self, index: Index = None) -> int:
        """Returns the same as :meth:`max_memory_reserved`, under its older name."""
        return self.max_memory_reserved(index)

    def reset_max_memory_allocated(self, index: Index = None) -> None:
        """Does the same as :meth:`reset_peak_memory_stats`: torch keeps one set of peaks."""
        self.reset_peak_memory_stats(index)

    def reset_max_memory_cached(self, index: Index = None) -> None:
        """Does the same as :meth:`reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(index)

    # --- types ------------------------------------------------------------------------------------------------------

    def is_fp16_supported(self) -> bool:
        """Returns whether training in fp16 works on this device; on the CPU it does, other than upstream."""
        return True

    def is_bf16_supported(self) -> bool:
        """Returns whether training in bf16 works on this device, regardless of its speed.

        It does unless torch's device module reports the opposite.
        """
        query = getattr(self._module, "is_bf16_supported", None)
        return True if query is None else bool(query())

    def is_fp64_supported(self) -> bool:
        """Returns whether the device has fp64, by its properties (some Intel GPUs do not); True if not listed."""
        return bool(getattr(self._call("get_device_properties"), "has_fp64", True))

    def emulates(self, dtype: torch.dtype) -> bool:
        """Returns whether the device emulates ``dtype`` for lack of instructions: correct, but many times slower."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the floating dtypes that training can use: fp32 always, then what the device supports."""
        optional = ((self.is_fp16_supported(), torch.half), (self.is_bf16_supported(), torch.bfloat16))
        return [torch.float] + [dtype for supported, dtype in optional if supported]

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The default dtype of ``torch.autocast`` on this device."""
        return torch.get_autocast_dtype(self._name)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Returns ``torch.autocast`` on this device."""
        return torch.autocast(device_type=self._name, dtype=dtype)

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """Returns a callable that makes a tensor from data: only cuda and cpu have torch's typed constructors."""
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    FloatTensor = _typed_tensor(torch.float, "an fp32")
    HalfTensor = _typed_tensor(torch.half, "an fp16")
    BFloat16Tensor = _typed_tensor(torch.bfloat16, "a bf16")
    DoubleTensor = _typed_tensor(torch.double, "an fp64")
    IntTensor = _typed_tensor(torch.int, "an int32")
    LongTensor = _typed_tensor(torch.long, "an int64")
    ByteTensor = _typed_tensor(torch.uint8, "a uint8")

    # --- host memory ------------------------------------------------------------------------------------------------

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns a host tensor whose transfers to this device may overlap other work.

        Args:
            tensor: A host tensor of any shape. With ``make_copy``, a contiguous one that is pinned is returned itself.
            make_copy: Copy the values; False leaves the values of the result undefined.
            match_shape: False returns the result flat (1-D).
        """
        if make_copy:
            pinned = tensor.contiguous().pin_memory()
        else:
            pinned = self.pin_empty(tensor.shape, dtype=tensor.dtype)
        return pinned if match_shape else pinned.reshape(-1)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` (any shape) lies in page-locked host memory."""
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> bool:
        """Returns False, for a tensor of any shape: only torch's allocator releases page-locked memory."""
        return False

    def pin_empty(self, *size: Any, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
        """Returns an uninitialized page-locked host tensor (any shape): only ``device="cpu"`` has such memory.

        Raises:
            ValueError: ``device`` is something else.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"pin_empty(device={device!r}): only host memory can be page-locked; leave device at 'cpu'"
            )
        return torch.empty(*size, dtype=dtype, device="cpu", pin_memory=True)

    def pin_empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized page-locked host tensor with the shape and dtype of ``tensor``."""
        return self.pin_empty(tensor.shape, dtype=tensor.dtype)

    # --- behavior --------------------------------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Returns whether an operation is finished when its call returns, as on the CPU."""
        return False

    def use_host_timers(self) -> bool:
        """Returns whether the host's clock measures device work correctly without synchronization."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Returns whether results may be read without waiting on streams."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Returns whether memory stays bounded when work is queued faster than the device executes it."""
        return self.is_synchronized_device()

    def range_push(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Opens a range in the device's profiler; does nothing where it has none."""

    def range_pop(self, *args: Any, **kwargs: Any) -> None:
        """Closes the range that was opened last."""

    def lazy_call(self, fn: Callable[[], Any]) -> None:
        """Calls ``fn`` once the device context exists; immediately where torch's module has no queue of calls."""
        getattr(self._module, "_lazy_call", lambda call: call())(fn)

    def is_triton_supported(self) -> bool:
        """Returns whether Triton kernels run on this device."""
        return False

    def create_graph(self) -> Any:
        """Returns a new, empty device graph. Raises NotYetSupportedError: the device has no graphs."""
        self._no_graphs("create_graph()")

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Returns a context that records device work into ``graph`` instead of running it."""
        self._no_graphs("capture_to_graph()")

    def replay_graph(self, graph: Any) -> None:
        """Runs what ``graph`` recorded."""
        self._no_graphs("replay_graph()")

    def _no_graphs(self, call: str) -> NoReturn:
        raise NotYetSupportedError(
            f"{call}: expected a cuda device, as only these have graphs, found {self._name}; call the function itself"
        )

    # --- launching --------------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Returns the prefixes of environment variables that a launcher must set on other hosts too."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Returns the names of the environment variables that select the devices of a process."""
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Writes the ids into every visible-device variable of ``current_env``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # --- compile ----------------------------------------------------------------------------------------------------

    def get_compile_backend(self) -> str:
        """Returns the backend that ``torch.compile`` is called with."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Chooses the backend for ``torch.compile``. Raises DeepSpeedConfigError: torch has no backend of that name."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise DeepSpeedConfigError(
                f"set_compile_backend({backend!r}): torch.compile has no such backend on {self._name}; "
                f"choose one of {', '.join(sorted(known))}"
            )
        self._compile_backend = backend

    # --- compiled operators: none -----------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Returns the package of the builders, which compile nothing."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Returns a builder by the name of its class; None for an unknown name."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    def get_op_builder(self, class_name: str) -> Any:
        """Returns the class of a builder by its name; None for an unknown name."""
        known = importlib.import_module(f"{self.op_builder_dir()}.builder")
        return getattr(known, class_name, None) if class_name.endswith("Builder") else None

    def build_extension(self) -> Any:
        """Raises NotYetSupportedError, as there are no compiled operators."""
        self._no_op_builders("build_extension()")

    def _no_op_builders(self, call: str) -> NoReturn:
        raise NotYetSupportedError(
            f"{call}: this package is pure Python and has no operators to build; "
            "use its optimizers in deepspeed.ops, which need no compiler"
        )


class SingleDeviceAccelerator(DeepSpeedAccelerator):
    """An accelerator with one device and one queue of work."""

    def device(self, index: Index = None) -> AbstractContextManager[Any]:
        """Returns a context that does nothing: there is one device."""
        return nullcontext()

    def current_device(self) -> int:
        """Returns 0."""
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the only generator."""
        self.manual_seed(seed)

    def default_stream(self, index: Index = None) -> Any:
        """Returns the current stream: there is no other."""
        return self.current_stream()

    def memory_stats(self, index: Index = None) -> dict[str, Any]:
        """Returns the allocated bytes and their peak under the names of torch's allocators."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }
