"""Shards modules as they are built.

While a construction is active every module class has its ``__init__`` wrapped, those that are defined meanwhile
included. When the outermost ``__init__`` of a module returns, the module's own parameters are sharded. What comes later
(a parameter registered afterwards, a class whose ``__init__`` could not be wrapped) is found when the ``__init__`` of a
module above it returns, when the context ends, or in ``deepspeed.initialize``.

Code of the model may still use parameters that are sharded already, such as a last pass over all weights that scales
some of them. Every rank runs that code, so the parameter is gathered for it, and rank 0's values count afterwards. Such
a pass may also follow when the context has ended (``serving_all_ranks``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.comm.transports.transport import Transport
from deepspeed.torch_private import storage_references
from deepspeed.zero.access.gathered import GatheredBlock
from deepspeed.zero.access.views import install_views
from deepspeed.zero.address import address_of, showing_wholes
from deepspeed.zero.construction.provisional import shard_parameters
from deepspeed.zero.construction.sharing import ProvisionalGroups
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.untouched import is_untouched, untouched

_ABSENT = object()
_built: weakref.WeakKeyDictionary[Transport, int] = weakref.WeakKeyDictionary()
"""Modules sharded so far, by the ranks that build them: names them alike on all ranks."""


class Patch:
    """Replaces one attribute of an object between :meth:`apply` and :meth:`revert`."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._before: Any = _ABSENT

    def apply(self) -> None:
        """Puts the replacement in place."""
        self._before = vars(self._owner).get(self._name, _ABSENT)
        setattr(self._owner, self._name, self._replacement)

    def revert(self) -> None:
        """Restores the original; an attribute that other code has replaced since is left alone."""
        if vars(self._owner).get(self._name, _ABSENT) is not self._replacement:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class Construction:
    """The settings of one ``zero.Init`` context."""

    def __init__(
        self,
        groups: ProvisionalGroups,
        device: torch.device,
        dtype: torch.dtype | None,
        shard_device: torch.device,
        patches: Sequence[Patch] = (),
    ) -> None:
        self.groups = groups
        self.device = device
        self.dtype = dtype
        self.shard_device = shard_device
        self.patches = list(patches)
        self._unfinished: list[int] = []
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open: list[tuple[torch.nn.Parameter, GatheredBlock]] = []

    # -- modules -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module) -> bool:
        """Records that an ``__init__`` of ``module`` starts. Returns whether it is the outermost one."""
        if id(module) in self._unfinished:
            return False
        self._unfinished.append(id(module))
        return True

    def abandon(self, module: nn.Module) -> None:
        """Called when the outermost ``__init__`` raised."""
        self._unfinished.remove(id(module))

    def finish(self, module: nn.Module) -> None:
        """Shards the module's parameters. Called when the outermost ``__init__`` returned."""
        self._unfinished.remove(id(module))
        if "_modules" not in module.__dict__:
            return  # it never called Module.__init__
        self._seen.add(module)
        self._order[module] = len(self._order)
        self.shard_tree(module)
        if not self._unfinished:
            self.close_open()

    def shard_tree(self, module: nn.Module) -> None:
        """Shards the parameters of a module and those below it that were built in this context and can be sharded."""
        for part in module.modules():
            if part in self._seen and id(part) not in self._unfinished:
                self.shard(part)

    def shard(self, module: nn.Module) -> None:
        """Shards the parameters that a module itself owns."""
        found = {name: p for name, p in module._parameters.items() if p is not None and _can_be_sharded(p)}
        if not found:
            return
        install_views()
        peers = self.groups.peers
        count = _built[peers] = _built.get(peers, 0) + 1
        title = f"{type(module).__name__}#{count}"
        by_group: dict[str, tuple[BucketGroup, dict[str, nn.Parameter]]] = {}
        names = {id(parameter): f"{title}.{name}" for name, parameter in found.items()}
        for name, parameter in {names[id(parameter)]: parameter for parameter in found.values()}.items():
            group = self.groups.of(name, parameter)
            by_group.setdefault(group.name, (group, {}))[1][name] = parameter
        for group, members in by_group.values():
            shard_parameters(
                list(members.values()),
                list(members),
                group=group,
                device=self.device,
                dtype=self.dtype,
                shard_device=self.shard_device,
                gatherer=self.gather,
            )

    def end(self) -> None:
        """Shards what is left. Called when the context ends without an exception."""
        self.close_open()
        for module in sorted(self._seen, key=self._order.__getitem__):
            self.shard(module)
        self._seen.clear()

    def drop(self) -> None:
        """Called when the context ends with an exception. Sends nothing, since the other ranks may be anywhere."""
        self.drop_open()
        self._seen.clear()

    # -- uses of parameters that are sharded already -----------------------------------------------------------------

    def gather(self, parameter: torch.nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """Makes a parameter full, in its own shape, for code of the model. Every rank runs that code.

        Returns:
            False if that is not allowed: after the context has ended, except inside :func:`serving_all_ranks`.
        """
        if is_untouched():
            return False
        if self not in _active:
            if _served is None:
                return False
            if self not in _served:
                _served.append(self)
        with untouched():
            needed = {id(other) for other in together}
            self._close(lambda other: id(other) not in needed and not _has_views(other))
            address = address_of(parameter)
            assert address is not None
            block = GatheredBlock([(parameter, address)], modifier=0)
            block.open()
            self._open.append((parameter, block))
        return True

    def close_open(self) -> None:
        """Reshards what :meth:`gather` made full; rank 0's values count."""
        with untouched():
            self._close(lambda other: True)

    def drop_open(self) -> None:
        """Reshards what :meth:`gather` made full without communication: changes are lost."""
        for _, block in self._open:
            block.give_back(restore=False)
        self._open.clear()

    def _close(self, is_done: Callable[[torch.nn.Parameter], bool]) -> None:
        kept = []
        for parameter, block in self._open:
            if is_done(parameter):
                block.close(None)
            else:
                kept.append((parameter, block))
        self._open = kept


def _can_be_sharded(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a parameter has values of its own: neither sharded, nor lazy, nor on the meta device."""
    return address_of(parameter) is None and not is_lazy(parameter) and parameter.device.type != "meta"


_KNOWN_REFERENCES = 3  # to the storage of a loaned tensor: the loan's, the parameter's, and the caller's


def _has_views(parameter: torch.nn.Parameter) -> bool:
    """Returns whether code of the model holds a view of a parameter that was gathered for it, and may write to it."""
    return storage_references(parameter.data.untyped_storage()) > _KNOWN_REFERENCES


# -- the active contexts ---------------------------------------------------------------------------------------------

_active: list[Construction] = []
_class_patches: list[Patch] = []
_shown = ExitStack()
_served: list[Construction] | None = None
"""Ended constructions whose parameters were gathered inside ``serving_all_ranks``; None outside."""


def enter(construction: Construction) -> None:
    """Makes ``construction`` the one that shards new modules."""
    if not _active:
        _wrap_classes()
    _active.append(construction)
    for patch in construction.patches:
        patch.apply()


def leave(construction: Construction) -> None:
    """Deactivates ``construction``; the enclosing one continues."""
    for patch in reversed(construction.patches):
        patch.revert()
    _active.remove(construction)
    if not _active:
        _unwrap_classes()


def is_sharding() -> bool:
    """Returns whether modules that are built now are sharded (``zero.Init``)."""
    return bool(_active)


def shard_built(module: nn.Module) -> None:
    """Shards a module that no ``__init__`` has built, a copy, if a context is active. Every rank must call it."""
    if _active and not is_untouched():
        for part in module.modules():
            _active[-1].shard(part)


@contextmanager
def suspended() -> Iterator[None]:
    """Suspends every active ``zero.Init`` inside the context: modules and tensors are built as usual."""
    waiting = list(_active)
    _active.clear()
    for construction in reversed(waiting):
        for patch in reversed(construction.patches):
            patch.revert()
    if waiting:
        _unwrap_classes()
    try:
        yield
    finally:
        if waiting:
            _wrap_classes()
        for construction in waiting:
            for patch in construction.patches:
                patch.apply()
        _active[:] = waiting


@contextmanager
def serving_all_ranks() -> Iterator[None]:
    """Lets parameters of ended contexts show their shapes, and gathers them when they are used inside.

    For code of a model that every rank runs; rank 0's values count afterwards. Parameters of an engine are left to it.
    """
    global _served
    if _served is not None:
        yield
        return
    _served = []
    try:
        with showing_wholes():
            yield
        for construction in _served:
            construction.close_open()
    except BaseException:
        for construction in _served:
            construction.drop_open()
        raise
    finally:
        _served = None


def _wrap_classes() -> None:
    for kind in _all_subclasses(nn.Module):
        _wrap(kind)
    original = nn.Module.__dict__.get("__init_subclass__")

    def wrap_new_class(cls: type, **kwargs: Any) -> None:
        if original is not None:
            original.__get__(None, cls)(**kwargs)
        else:
            super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
        if _active:
            _wrap(cls)

    patch = Patch(nn.Module, "__init_subclass__", classmethod(wrap_new_class))
    patch.apply()
    _class_patches.append(patch)
    _shown.enter_context(showing_wholes())  # constructors read the sizes of layers that are built and sharded already


def _unwrap_classes() -> None:
    _shown.close()
    while _class_patches:
        _class_patches.pop().revert()


def _all_subclasses(kind: type) -> list[type]:
    found: set[type] = {kind}
    waiting: list[type] = [kind]
    while waiting:
        children: list[type] = type.__subclasses__(waiting.pop())
        for child in children:
            if child not in found:
                found.add(child)
                waiting.append(child)
    return [kind for kind in found if not kind.__module__.startswith("torch.jit")]


def _wrap(kind: type) -> None:
    original = kind.__dict__.get("__init__")
    if isinstance(original, FunctionType):
        patch = Patch(kind, "__init__", _wrapped(original))
        patch.apply()
        _class_patches.append(patch)


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a method
        construction = _active[-1] if _active else None
        if construction is None or is_untouched() or not construction.begin(self):
            original(self, *args, **kwargs)
            return
        try:
            original(self, *args, **kwargs)
        except BaseException:
            construction.abandon(self)
            raise
        construction.finish(self)

    return __init__
