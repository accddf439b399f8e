"""Every operation of torch as work of an actor that reads and writes memory.

What an operation reads and writes is in its schema. Where it runs follows from its tensors: with one in device memory
it is a kernel on the current stream, else it is host code. The kernels really run at once, on the CPU. Where the stream
waits for a transfer between ranks that is not over, the host waits for it first, or, on every stream but the default
one, leaves the kernel to a thread of the stream and continues.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.device.clocks import Actor, Clocks
from tests.harness.device.jobs import Job, unfinished
from tests.harness.device.memory import Block, Memory, Ranges
from tests.harness.device.places import Place

_aten = torch.ops.aten
_UNWRITTEN = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Their schema does not say that they touch no memory.
_VIEWS = {"_unsafe_view", "lift_fresh", "set_"}
# The host needs their result, so it waits for the current stream.
_WAITED_FOR = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.bincount.default,  # for the smallest and the largest value
    _aten.unique_dim.default,
    _aten._unique2.default,
}
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default}
_MOST_RANGES = 128  # of a tensor with gaps; above that, all bytes that it spans


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Returns all tensors in lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found += tensors_of(value)
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def ranges_of(tensor: torch.Tensor) -> Ranges:
    """Returns the ranges of bytes of its storage that a tensor covers."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return ()
    if tensor.is_contiguous():
        return ((start, start + tensor.numel() * size),)
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, extent) for stride, extent in pairs if extent > 1 and stride)
    length = 1
    while dims and dims[0][0] == length:  # together they are one range
        length *= dims.pop(0)[1]
    ranges = 1
    for _, extent in dims:
        ranges *= extent
    if ranges > _MOST_RANGES:
        span = length + sum(stride * (extent - 1) for stride, extent in dims)
        return ((start, start + span * size),)
    starts = [0]
    for stride, extent in dims:
        starts = [first + stride * index for first in starts for index in range(extent)]
    return tuple((start + first * size, start + (first + length) * size) for first in sorted(starts))


@dataclass(frozen=True)
class _Shape:
    """What an operation does, as far as its name and its schema say.

    Attributes:
        name: Of the operation.
        written: Names and positions of the arguments that are written.
        is_view: The result is memory of an argument and nothing is computed.
        is_factory: Its tensors are only models of the one that it makes.
        is_copy: It moves values and does nothing else.
        is_waited_for: The host needs its result.
        leaves_blank: It does not write the tensor that it makes.
        is_in_place: All of its results are arguments.
        is_random: Its results depend on a generator.
    """

    name: str
    written: frozenset[int | str]
    is_view: bool
    is_factory: bool
    is_copy: bool
    is_waited_for: bool
    leaves_blank: bool
    is_in_place: bool
    is_random: bool


_shapes: dict[int, _Shape] = {}
"""By the address of the operation, which lives as long as the process."""


def _shape_of(func: Any) -> _Shape:
    return _shapes.get(id(func)) or _read_schema(func)


def _read_schema(func: Any) -> _Shape:
    schema = func._schema
    written: set[int | str] = set()
    aliased = False
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written |= {index, argument.name}
        else:
            aliased = True
    name = schema.name.removeprefix("aten::")
    found = _shapes[id(func)] = _Shape(
        name,
        frozenset(written),
        is_view=name in _VIEWS or (aliased and not written),
        is_factory=name.endswith("_like") or name.startswith(("new_", "empty")),
        is_copy=func in _COPIES,
        is_waited_for=func in _WAITED_FOR,
        leaves_blank=func in _UNWRITTEN,
        is_in_place=all(value.alias_info is not None for value in schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
    )
    return found


class Operations(TorchDispatchMode):
    """Records operations while it is active as a context manager.

    Args:
        clocks: Of the device.
        memory: What is read and written.
    """

    def __init__(self, clocks: Clocks, memory: Memory) -> None:
        super().__init__()
        self._clocks = clocks
        self._memory = memory
        self._asked: bool | None = None  # where a new tensor is requested: on the device or not; None: not given

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def requested(self, on_device: bool | None) -> Iterator[None]:
        """Sets the device of tensors that are created in the block; None changes nothing."""
        before = self._asked
        self._asked = before if on_device is None else on_device
        try:
            yield
        finally:
            self._asked = before

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in device memory."""
        with torch._C.DisableTorchFunction():
            return _is_plain(tensor) and self._memory.on_device(tensor.untyped_storage())

    def touch(self, tensor: torch.Tensor, actor: Actor, place: Place, *, writes: bool) -> None:
        """Records that ``actor`` reads or writes a tensor outside of torch's operations."""
        with torch._C.DisableTorchFunction():
            self._touch([tensor], actor, actor.work(), place, writes=writes)

    def hold(self, tensor: torch.Tensor, job: Job) -> None:
        """Keeps the memory of a tensor in place until ``job``, which uses it, is over."""
        with torch._C.DisableTorchFunction():
            self._memory.hold(tensor.untyped_storage(), job)

    def _touch(self, tensors: Any, actor: Actor, time: int, place: Place, *, writes: bool) -> None:
        for tensor in tensors_of(tensors):
            if _is_plain(tensor):
                block = self._memory.know(tensor.untyped_storage(), on_device=False)
                self._memory.access(block, ranges_of(tensor), actor, time, place, writes=writes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = _shape_of(func)
        given = [tensor for tensor in tensors_of((args, kwargs)) if _is_plain(tensor)]
        asked = bool(self._asked)
        blocks = [self._memory.know(tensor.untyped_storage(), on_device=asked) for tensor in given]
        if shape.is_view:
            return func(*args, **kwargs)
        place = Place(shape.name)
        if shape.is_copy:
            return self._copy(func, args, kwargs, place)
        on_device = any(block.on_device for block in blocks)
        if self._asked is not None and (shape.is_factory or not any(tensor.dim() for tensor in given)):
            on_device = self._asked or (on_device and not shape.is_factory)
        actor: Actor = self._clocks.launch() if on_device else self._clocks.host
        time = actor.work()
        if not shape.is_factory:
            for key, argument in [*enumerate(args), *kwargs.items()]:
                self._touch_all(argument, on_device, actor, time, place, writes=key in shape.written)
        result = self._execute(func, args, kwargs) if on_device else func(*args, **kwargs)
        if not shape.is_in_place:
            self._note_results(result, blocks, on_device, actor, time, None if shape.leaves_blank else place)
        if on_device and shape.is_waited_for:
            self._clocks.current.synchronize()
        return result

    def _note_results(
        self, result: Any, given: list[Block], on_device: bool, actor: Actor, time: int, place: Place | None
    ) -> None:
        """Notes the tensors that an operation has made, and, with a place, that it has written them."""
        for tensor in tensors_of(result):
            if not _is_plain(tensor):
                continue
            made = self._memory.know(tensor.untyped_storage(), on_device=on_device)
            if any(made is block for block in given):
                continue
            made.is_blank = on_device
            if place is not None:
                self._memory.access(made, ranges_of(tensor), actor, time, place, writes=True)

    def _touch_all(
        self, argument: Any, on_device: bool, actor: Actor, time: int, place: Place, *, writes: bool
    ) -> None:
        """Calls :meth:`_touch` for every tensor. A kernel reads the values of host scalars when it is queued."""
        for tensor in tensors_of(argument):
            if not _is_plain(tensor):
                continue
            block = self._memory.know(tensor.untyped_storage(), on_device=False)
            if block.on_device or not on_device:
                self._memory.access(block, ranges_of(tensor), actor, time, place, writes=writes)
            else:
                self._memory.mixed(tensor, place, writes=writes)
                host = self._clocks.host
                self._memory.access(block, ranges_of(tensor), host, host.work(), place, writes=writes)

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a kernel of the current stream, now or when what the stream waits for is over."""
        stream, shape = self._clocks.current, _shape_of(func)
        if stream.jobs:
            stream.jobs = unfinished(stream.jobs)
        can_wait = shape.is_in_place or not shape.written
        if not stream.jobs or stream is self._clocks.default or shape.is_waited_for or not can_wait or shape.is_random:
            stream.finish()
            return func(*args, **kwargs)
        if shape.is_in_place:
            names = [*enumerate(args), *kwargs.items()]
            written = [value for name, value in names if name in shape.written]
            returns = func._schema.returns
            result = None if not returns else written[0] if len(returns) == 1 else tuple(written)
        else:  # of values that are not there yet, for its shape
            result = func(*args, **kwargs)

        def run() -> None:
            with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction(), torch.no_grad():
                made = func(*args, **kwargs)
                if not shape.is_in_place:
                    for target, source in zip(tensors_of(result), tensors_of(made), strict=True):
                        target.copy_(source)

        job = stream.put(run)
        for tensor in tensors_of((args, kwargs, result)):
            if _is_plain(tensor) and self._memory.on_device(tensor.untyped_storage()):
                self._memory.hold(tensor.untyped_storage(), job)
        return result

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
        if func is _aten._to_copy.default:
            source, later = args[0], bool(kwargs.get("non_blocking", False))
            kwargs = {**kwargs, "non_blocking": False}
            if self._asked is None and self._memory.on_device(source.untyped_storage()):
                result = self._execute(func, args, kwargs)
            else:
                if self._asked or self._memory.on_device(source.untyped_storage()):
                    self._clocks.current.finish()  # the values are taken in the next line
                result = func(*args, **kwargs)
            there = self._memory.on_device(source.untyped_storage()) if self._asked is None else self._asked
            block = self._memory.know(result.untyped_storage(), on_device=there)
            origin = self._memory.block(source.untyped_storage())
            if origin is not None and origin.is_unwritten:  # a cast of what ``empty`` has made is as empty
                block.is_blank = there
                return result
            if later and not there and self._memory.on_device(source.untyped_storage()):
                self._memory.pin(result.untyped_storage())  # so does torch
            self._copied(result, source, place, later=later)
            return result
        later = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        targets, sources = list(tensors_of(args[0])), list(tensors_of(args[1]))
        for target, source in zip(targets, sources, strict=True):
            self._copied(target, source, place, later=later)
        up = any(self._memory.on_device(tensor.untyped_storage()) for tensor in (*targets, *sources))
        return self._execute(func, args, kwargs) if up else func(*args, **kwargs)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, place: Place, *, later: bool) -> None:
        clocks, memory = self._clocks, self._memory
        up = memory.on_device(target.untyped_storage())
        down = memory.on_device(source.untyped_storage())
        if not up and not down:
            time = clocks.host.work()
            self._touch([source], clocks.host, time, place, writes=False)
            self._touch([target], clocks.host, time, place, writes=True)
            return
        stream = clocks.launch()
        if up and down:
            time = stream.work()
            self._touch([source], stream, time, place, writes=False)
            self._touch([target], stream, time, place, writes=True)
            return
        of_host, of_device = (source, target) if up else (target, source)
        block = memory.block(of_host.untyped_storage())
        assert block is not None
        if later and block.pages != "plain":
            memory.lend(block, stream)
            time = stream.work()
            self._touch([source], stream, time, place, writes=False)
            self._touch([target], stream, time, place, writes=True)
            return
        if up:
            self._touch([of_host], clocks.host, clocks.host.work(), place, writes=False)
            clocks.launch()
            stream.finish()  # the host may write there again at once
        self._touch([of_device], stream, stream.work(), place, writes=up)
        if down or not later:  # from ordinary pages the values are taken at once, and the host does not wait
            clocks.current.synchronize()
        if down:
            self._touch([of_host], clocks.host, clocks.host.work(), place, writes=True)
