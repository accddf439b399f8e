"""Handles: autograd saves them instead of views of memory that will be freed.

While a forward runs, a pair of saved-tensor hooks looks at everything autograd saves. A tensor that lies in a sharded
bucket is stored as a handle (bucket, offset, shape, strides); when backward needs it, the bucket is gathered, wherever
the use is: a tied weight, a view of a foreign bucket, a parameter used outside its module. A bucket without live
handles whose gradients have arrived may be freed again.

``torch.func`` refuses to differentiate while such hooks are active, so for the length of a transform ours stand aside.
What is saved inside are bare views; memory that they see is left to them (``FlatBuffer.free``). A backward with
``create_graph`` saves as well, and no hook can be installed for it: it computes with copies, which live as its graph.

In a model that ``torch.compile`` cut into graphs the hooks also run between the graphs, where the compiler follows
every Python function. They are excluded from compilation, and so is the gather that they may call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import graph

from deepspeed.errors import CallOrderError
from deepspeed.torch_private import storage_key
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.schedule import GatherSchedule
from deepspeed.zero.passes import PassTracker


class Handle:
    """A saved view, of any shape, of a bucket. Counts itself among the bucket's live handles until it dies."""

    __slots__ = ("_hooks", "bucket", "offset", "size", "stride", "tile", "version")

    @partial(uncompiled, recursive=False)
    def __init__(self, bucket: Bucket, tensor: torch.Tensor, hooks: SavedTensorHooks) -> None:
        self.bucket = bucket
        self.offset = int(tensor.storage_offset())
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.tile = bucket.tile_at(self.offset)
        self.version = bucket.params[self.tile]._version
        self._hooks = hooks
        bucket.live_handles += 1

    def refuse_if_stale(self) -> None:
        """Checks that the parameter has not changed since it was saved, as torch does for plain tensors.

        Raises:
            CallOrderError: It has changed.
        """
        version = self.bucket.params[self.tile]._version
        if version != self.version:
            raise CallOrderError(
                f"backward needs parameter {self.bucket.layout.tiles[self.tile].name!r} as the forward saw it, "
                f"but it was changed since (version {self.version} then, {version} now): by an update or "
                "another write. Call backward before that, or run the forward again"
            )

    @partial(uncompiled, recursive=False)
    def __del__(self) -> None:
        self.bucket.live_handles -= 1
        if self.bucket.live_handles == 0:
            self._hooks.note_dead(self.bucket)


class _GuardedPack:
    """A pack hook that passes on what it is given: a view in the place of a tensor that lies in a sharded bucket."""

    def __init__(self, by_storage: Mapping[int, Bucket], pack: Callable[[torch.Tensor], Any]) -> None:
        self.by_storage = by_storage
        self._pack = pack

    @partial(uncompiled, recursive=False)
    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is torch.strided and storage_key(tensor) in self.by_storage:
            tensor = tensor.detach()
        return self._pack(tensor)


class SavedTensorHooks:
    """Packs views of sharded buckets as handles between :meth:`push` and :meth:`pop`."""

    def __init__(self, buckets: list[Bucket], schedule: GatherSchedule, passes: PassTracker) -> None:
        self._by_storage = {bucket.full.storage_key: bucket for bucket in buckets}
        for bucket in buckets:
            bucket.full.on_move = self._follow
        # None at the engine's end: a graph that remains must not keep them
        self._schedule: GatherSchedule | None = schedule
        self._passes: PassTracker | None = passes
        _alive.add(self)

    def close(self) -> None:
        """Drops all references at the engine's end. A later backward through a remaining graph raises."""
        self._schedule = self._passes = None
        for bucket in self._by_storage.values():
            bucket.full.on_move = None
        self._by_storage = {}

    @partial(uncompiled, recursive=False)
    def note_dead(self, bucket: Bucket) -> None:
        """Called when the last live handle of a bucket dies."""
        if self._passes is not None:
            self._passes.note_dead_handle(bucket)

    def _follow(self, old_key: int, new_key: int) -> None:
        """Follows a bucket to its new memory, after the old memory was left to other views of it."""
        self._by_storage[new_key] = self._by_storage.pop(old_key)

    def push_guard(self) -> bool:
        """Wraps active hooks of other libraries, to give them views; returns whether :meth:`pop_guard` must follow.

        Such hooks may keep the parameter object itself (non-reentrant checkpointing does so where it is frozen). Its
        memory is taken from it when its bucket is resharded, and backward would compute with the placeholder. A view
        keeps its values: see ``FlatBuffer.free``.
        """
        if not self._by_storage or not torch.is_grad_enabled():
            return False
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] == self._pack:
            return False
        if isinstance(top[0], _GuardedPack) and top[0].by_storage is self._by_storage:  # not another engine's
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(_GuardedPack(self._by_storage, top[0]), top[1])
        return True

    def pop_guard(self) -> None:
        """Undoes :meth:`push_guard`."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def push(self) -> bool:
        """Installs the hooks unless others are active (as in non-reentrant checkpointing); returns whether it did."""
        if not self._by_storage or not torch.is_grad_enabled():
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        self._torchs_disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._stand_aside  # torch.func looks it up there for each transform
        return True

    def pop(self) -> None:
        """Undoes :meth:`push`."""
        graph.disable_saved_tensors_hooks = self._torchs_disable
        torch._C._autograd._pop_saved_tensors_default_hooks()

    @contextmanager
    def _stand_aside(self, error_message: str) -> Iterator[None]:
        """Yields under ``torch.autograd.graph.disable_saved_tensors_hooks``, but tolerates our hooks below."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        are_ours = top is not None and top[0] == self._pack
        if are_ours:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._torchs_disable(error_message):
                yield
        finally:
            if are_ours:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    @partial(uncompiled, recursive=False)
    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        bucket = self._by_storage.get(storage_key(tensor))
        if bucket is not None:
            return Handle(bucket, tensor, self)
        return _without_graph(tensor)

    @partial(uncompiled, recursive=False)
    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Handle):
            return packed
        if self._schedule is None:
            raise CallOrderError(
                f"backward needs the sharded parameters {packed.bucket.label}, but engine.destroy was called since the "
                "forward, and nothing gathers them any more. Call backward before that"
            )
        self._schedule.demand(packed.bucket)
        packed.refuse_if_stale()
        view = torch.as_strided(packed.bucket.full.tensor, packed.size, packed.stride, packed.offset)
        # A backward that is differentiated itself (create_graph) saves what it computes with, bare.
        return view.clone() if torch.is_grad_enabled() else view

    def bucket_of(self, tensor: torch.Tensor) -> Bucket | None:
        """Returns the bucket in whose memory ``tensor`` (any shape and strides) lies, or None."""
        return self._by_storage.get(storage_key(tensor))


_alive: weakref.WeakSet[SavedTensorHooks] = weakref.WeakSet()


def bucket_of(tensor: torch.Tensor) -> Bucket | None:
    """Returns the sharded bucket of any engine in whose memory ``tensor`` (any shape) lies, or None."""
    if tensor.layout is not torch.strided:
        return None
    buckets = (hooks.bucket_of(tensor) for hooks in _alive)
    return next((bucket for bucket in buckets if bucket is not None), None)


def handing_on() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Returns the pack and unpack functions that hooks installed now must use for tensors that are not theirs.

    None: they must not be installed, as there are others, which are not of a sharded model, or a transform forbids it.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return None
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None:
        return _without_graph, _same
    return top if isinstance(getattr(top[0], "__self__", None), SavedTensorHooks) else None


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without its graph; with it, an operation that saves its own result would never be freed."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def _same(value: Any) -> Any:
    return value
