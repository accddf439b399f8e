"""The communication log: how often, how much and how long each collective ran. Off by default.

``comms_logger`` in the configuration, or :func:`deepspeed.comm.configure`, turns it on; every collective of
``deepspeed.comm`` then passes through :func:`recorded`. With the log off that costs one attribute test per call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.errors import CallOrderError
from deepspeed.logging import log_dist

# The share of a collective's bytes that must cross each rank's link, as a function of the number of ranks; the usual
# definition of bus bandwidth (NCCL tests, PERFORMANCE.md).
_BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,  # the older name, allgather_fn
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass
class OperationTotals:
    """Totals of the calls of one collective at one message size."""

    seconds: list[float] = field(default_factory=list)  # one entry per call, in call order
    waited: float = 0.0  # seconds of all calls in which the program could not continue
    ranks: int = 1

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(self.seconds)


class CommsLog:
    """Counts, bytes and times per operation name and message size."""

    def __init__(self) -> None:
        self.enabled = False  # whether anything is recorded
        # record every operation; otherwise only those in ``prof_ops`` and calls with ``prof=True``
        self.prof_all = True
        self.prof_ops: list[str] = []  # names of operations to record
        self.verbose = False  # log a line for each operation
        self.debug = False  # put the caller's name into that line
        self._stopped: set[str] = set()
        self.totals: dict[str, dict[int, OperationTotals]] = {}

    def wants(self, name: str, prof: bool) -> bool:
        """Returns whether a call of ``name`` is to be recorded."""
        if name in self._stopped and name not in self.prof_ops:  # which may have been set anew since
            return False
        return self.enabled and (prof or self.prof_all or name in self.prof_ops)

    def start_profiling_comms(self) -> None:
        """Records every operation from now on, if the log is enabled."""
        self.prof_all = True
        self._stopped.clear()

    def stop_profiling_comms(self) -> None:
        """Records only the operations in ``prof_ops`` from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: list[str]) -> None:
        """Records these operations from now on, besides the others."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))
        self._stopped.difference_update(op_name_list)

    def stop_profiling_op(self, op_name_list: list[str]) -> None:
        """Records these operations no more, also where all others are recorded."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]
        self._stopped.update(op_name_list)

    def add(
        self, name: str, size: int, seconds: float, ranks: int, caller: str = "", waited: float | None = None
    ) -> None:
        """Records one call of the operation ``name`` with a message of ``size`` bytes, requested by ``caller``.

        ``seconds`` are from its start to its end; for a transfer that overlaps with computation, to the wait's end.
        ``waited`` are those in which the program was blocked by it; None: all.
        """
        totals = self.totals.setdefault(name, {}).setdefault(size, OperationTotals())
        totals.seconds.append(seconds)
        totals.waited += seconds if waited is None else waited
        totals.ranks = ranks
        if self.verbose:
            where = f" | caller: {caller}" if self.debug and caller else ""
            log_dist(f"comm op: {name} | time (ms): {seconds * 1e3:.2f} | bytes: {size} | ranks: {ranks}{where}")

    def rows(self) -> Iterator[tuple[str, int, OperationTotals]]:
        """Yields (operation, bytes, totals), sorted by operation, then size."""
        for name in sorted(self.totals):
            for size in sorted(self.totals[name]):
                yield name, size, self.totals[name][size]

    @property
    def comms_dict(self) -> Mapping[str, Mapping[int, list[Any]]]:
        """Operation -> bytes -> ``[count, milliseconds, algbw, busbw]``; of each call the time and the rates (Gbit/s).

        A copy. Assign an empty dict to forget what was recorded.
        """
        found: dict[str, dict[int, list[Any]]] = {}
        for name, size, totals in self.rows():
            rates = [bandwidths(name, size, seconds, totals.ranks) for seconds in totals.seconds]
            times = [seconds * 1e3 for seconds in totals.seconds]
            algorithm, bus = ([pair[number] for pair in rates] for number in range(2))
            found.setdefault(name, {})[size] = [totals.count, times, algorithm, bus]
        return MappingProxyType(found)

    @comms_dict.setter
    def comms_dict(self, value: Mapping[str, Any]) -> None:
        if value:
            raise CallOrderError(
                f"comms_logger.comms_dict: expected an empty dict, which forgets what was recorded; found entries for "
                f"{', '.join(map(str, value))}. Record operations by deepspeed.comm's collectives"
            )
        self.totals.clear()


log = comms_logger = CommsLog()


def bandwidths(name: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Returns (algorithm bandwidth, bus bandwidth) in gigabits per second of moving ``size`` bytes in ``seconds``."""
    if seconds <= 0:
        return 0.0, 0.0
    algorithm = size * 8 / seconds / 1e9
    factor = next((f for prefix, f in _BUS_FACTOR.items() if prefix in name), lambda n: 1.0)
    return algorithm, algorithm * factor(max(ranks, 1))


def num_bytes(value: object) -> int:
    """Returns the bytes of the tensors in ``value``: a tensor or (nested) lists and tuples of tensors; else 0.

    Other iterables may be objects to send, which reading would consume, and may have no end.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(num_bytes(item) for item in value)
    return 0


class _RecordedWork:
    """An operation in flight, in the log until its first ``wait`` returns; otherwise the operation itself."""

    def __init__(self, work: Any, finished: Callable[[float], None]) -> None:
        self._work = work
        self._finished: Callable[[float], None] | None = finished  # gets the start of the wait

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = self._work.wait(*args, **kwargs)
        if self._finished is not None:
            self._finished(started)
            self._finished = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def timed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a transport's method that starts a transfer of ``flat``, tensors or one; it is logged as ``name``.

    The method has a parameter ``label``, or one ``how`` that has a label.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def wrapper(self: Any, flat: Any, *args: Any, **kwargs: Any) -> Any:
            if not log.wants(name, False):
                return method(self, flat, *args, **kwargs)
            size, device = num_bytes(flat), _device_of(flat)
            arguments = signature.bind(self, flat, *args, **kwargs).arguments
            what = arguments["label"] if "label" in arguments else arguments["how"].label
            _settle(device)
            start = time.perf_counter()

            def finished(wait_start: float) -> None:
                _settle(device)
                now = time.perf_counter()
                log.add(name, size, now - start, self.size, what, waited=now - wait_start)

            return _RecordedWork(method(self, flat, *args, **kwargs), finished)

        return wrapper

    return decorate


def _settle(device: torch.device | None) -> None:
    """Waits for the device, so that host time is the operation's time."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_of(value: object) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, (list, tuple)):
        return next((device for device in map(_device_of, value) if device is not None), None)
    return None


def recorded(message: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a collective so that the log sees it.

    The decorated function also takes the keyword arguments ``prof`` (record this call even if only some operations are
    recorded), ``log_name`` (the name to record it under) and ``debug`` (the caller's name, for the verbose line; None:
    that of the calling function). ``message`` names the parameter whose bytes are the size of the message, the larger
    side of the operation; None if it moves no data.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own_name = function.__name__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(
            *args: Any, prof: bool = False, log_name: str | None = None, debug: str | None = None, **kwargs: Any
        ) -> Any:
            name = log_name or own_name
            if not log.wants(name, prof):
                return function(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            value = arguments.get(message) if message is not None else None
            device = _device_of(value)
            size = num_bytes(value)
            ranks = torch_dist.get_world_size(arguments.get("group"))
            caller = debug or (sys._getframe(1).f_code.co_name if log.debug else "")
            _settle(device)
            start = time.perf_counter()

            def finished(_wait_start: float = 0.0) -> None:
                _settle(device)
                log.add(name, size, time.perf_counter() - start, ranks, caller)

            result = function(*args, **kwargs)
            if hasattr(result, "wait"):
                return _RecordedWork(result, finished)
            finished()
            return result

        extra = [
            inspect.Parameter("prof", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool),
            inspect.Parameter("log_name", inspect.Parameter.KEYWORD_ONLY, default=own_name, annotation=str),
            inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=None),
        ]
        wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # type: ignore[attr-defined]
        return wrapper

    return decorate
