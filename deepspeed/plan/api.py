"""``deepspeed.plan(...)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from typing import Any

from deepspeed.accelerator.devices import Device, find_device, read_bytes
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.advice import advise
from deepspeed.plan.configs import read_config
from deepspeed.plan.degrees import DEGREES, at_degrees
from deepspeed.plan.limits import check_count
from deepspeed.plan.longest import longest_sequence
from deepspeed.plan.machine import Machine
from deepspeed.plan.models import model_source
from deepspeed.plan.pipeline import pipeline_of
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The keywords of :func:`plan`, other than degrees of parallelism."""

    nodes: int = 1  # number of nodes
    devices_per_node: int = 1
    # name in the table of devices, ``"cpu"`` for training on processors, or a :class:`Device`
    device: str | Device = "h100"
    # bytes of one device, or text with a unit such as ``"80GB"``; None: the device's
    device_memory: int | str | None = None
    host_memory: int | str | None = None  # bytes of one node's host memory, or text with a unit; None: not compared
    sequence_length: int = 2048  # tokens of a sample
    micro_batch: int | None = None  # samples per forward and rank; None: the configuration's
    accumulation: int | None = None  # micro-batches of a step and rank; None: the configuration's
    inputs: Any = None  # what the model's forward gets: a callable of ``(micro_batch, sequence_length)`` or its result
    activation_checkpointing: bool = False  # repeated blocks save only their inputs and are recomputed in backward
    compare_checkpointing: bool = True  # also find the activations with the other setting
    suggest: bool = True  # if it does not fit, look for changes that make it fit
    flops: float | None = None  # operations per second of a device; None: the table's
    link: float | None = None  # bytes per second and direction between devices of a node; None: the table's
    host_link: float | None = None  # bytes per second and direction between device and host; None: the table's
    network: float | None = None  # bytes per second and direction between nodes, per device; None: 50e9
    disk: float | None = None  # bytes per second of a node's disk; None: 5e9
    # share of device memory left to driver, communication library and fragmentation; None: 0.05
    headroom: float | None = None
    fp8: bool = False  # time linear layers in fp8; memory and traffic are not changed
    rank: int | None = None  # the simulated rank; None: the second, with a pipeline one of each kind of stage
    schedule: str | None = None  # the schedule of the pipeline; None: as configured, or ``1f1b``
    num_chunks: int | None = None  # chunks per stage; None: as configured, or as few as the schedule can have
    # Look for the longest sequences that fit; the plan's ``request.sequence_length`` is the result, a multiple of 1024
    # tokens. ``sequence_length`` and ``compare_checkpointing`` do not matter then.
    longest: bool = False

    def machine(self) -> Machine:
        """Returns the machine for the job; raises the errors of :func:`make_machine`."""
        return make_machine(**{name: getattr(self, name) for name in signature(make_machine).parameters})

    def request(self, model: Any, config: Any) -> Request:
        """Returns the request, with the configured degrees; arguments and errors are those of :func:`plan`."""
        numbers = ("nodes", "devices_per_node", "sequence_length", "micro_batch", "accumulation")
        _check_counts(**{name: getattr(self, name) for name in numbers})
        machine = self.machine()
        if self.rank is not None and self.rank not in range(machine.ranks):
            raise DeepSpeedConfigError(
                f"plan(rank={self.rank!r}): expected a whole number from 0 to {machine.ranks - 1}"
            )
        settings = read_config(config)
        return Request(
            source=model_source(model, self.inputs),
            config=settings,
            machine=machine,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            checkpointing=self.activation_checkpointing,
            kind="cpu" if machine.device.name == "cpu" else "cuda",
            rank=self.rank,
            pipeline=pipeline_of(settings, schedule=self.schedule, num_chunks=self.num_chunks),
        )


def _shows_options(function: Callable[..., Plan]) -> Callable[..., Plan]:
    """Gives :func:`plan` a signature that names every option with its default, for ``help()`` and editors."""
    options = [Parameter(entry.name, Parameter.KEYWORD_ONLY, default=entry.default) for entry in fields(PlanOptions)]
    degrees = [Parameter(name, Parameter.KEYWORD_ONLY, default=row.default) for name, row in DEGREES.items()]
    first = [entry.name for entry in options].index("schedule")  # the degrees stand before the options of stages
    given = [entry for entry in signature(function).parameters.values() if entry.kind != Parameter.VAR_KEYWORD]
    function.__signature__ = Signature([*given, *options[:first], *degrees, *options[first:]])  # type: ignore[attr-defined]
    return function


@_shows_options
def plan(model: Any, config: Any, **options: Any) -> Plan:
    """Returns memory and traffic of the rank that needs most memory, by running the engine on tensors without values.

    Nothing of the model's size is allocated, no device and no process group is used. Runs in one process.

    Args:
        model: A module (left alone), a callable that returns one or ``(model, inputs)``, ``"module:callable"``, a
            folder or JSON file with a transformers configuration, such a configuration, or a ``DecoderShape``.
        **options: The attributes of :class:`PlanOptions`, and ranks along the axes by the names of
            :data:`~deepspeed.plan.degrees.DEGREES`: ``pipe`` (the model is a ``DecoderShape`` or a decoder-only one of
            Transformers), ``tensor``, ``sequence``, ``ep``; None: as configured.

    Raises:
        DeepSpeedConfigError: The configuration cannot run, the model cannot be built without values, or a quantity has
            no unit.
        TypeError: An option is unknown.
    """
    known = signature(plan).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"plan({name}=...): expected one of {', '.join(known)}; rename the argument")
    degrees = {name: options.pop(name) for name in DEGREES if name in options}
    given = PlanOptions(**options)
    _check_counts(**degrees)
    request = at_degrees(given.request(model, config), **degrees)
    if given.longest:
        return longest_sequence(request)
    made = make_plan(request, compare=given.compare_checkpointing)
    if given.suggest and not made.fits:
        made.take_advice(advise(made))
    return made


def make_machine(
    device: str | Device,
    *,
    nodes: int,
    devices_per_node: int,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    flops: float | None = None,
    link: float | None = None,
    host_link: float | None = None,
    network: float | None = None,
    disk: float | None = None,
    headroom: float | None = None,
    fp8: bool = False,
) -> Machine:
    """Returns the machine for :func:`plan`; arguments as there.

    Raises:
        DeepSpeedConfigError: A rate is not above 0, ``headroom`` is no share, the memory of the device is not known, or
            it has no fp8.
    """
    for name, rate in {"flops": flops, "link": link, "host_link": host_link, "network": network, "disk": disk}.items():
        if rate is not None and not (isinstance(rate, (int, float)) and 0 < rate < math.inf):
            raise DeepSpeedConfigError(
                f"{name}: expected {'operations' if name == 'flops' else 'bytes'} per second above 0, found {rate!r}"
            )
    if headroom is not None and not (isinstance(headroom, (int, float)) and 0 <= headroom < 1):
        raise DeepSpeedConfigError(
            f"headroom: expected a share of device memory from 0 to below 1 (0.05 is 5 %), found {headroom!r}"
        )
    own_memory = None if device_memory is None else read_bytes(device_memory, "device memory")
    if isinstance(device, Device):
        found = device
    elif device in ("cpu", "other"):
        if own_memory is None:
            raise DeepSpeedConfigError(
                f"device {device!r} has no memory of its own in the table; give device memory too (--device-memory, "
                "device_memory=), such as 64GB"
            )
        found = Device(device, own_memory, 0.0, 0.0, 0.0, 0.0, "given")
    else:
        found = find_device(device)
    rates = {"flops": flops, "link": link, "host_link": host_link}
    given: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    found = replace(found, **given)
    if fp8 and not found.fp8_flops:
        raise DeepSpeedConfigError(
            f"fp8: device {found.name!r} has no fp8 operations per second (fp8_flops); choose another device, give "
            "them in a file of --machine, or leave fp8 out"
        )
    settings = {"network": network, "disk": disk, "headroom": headroom}
    return Machine(
        device=found,
        nodes=nodes,
        devices_per_node=devices_per_node,
        device_memory=own_memory or found.memory,
        host_memory=None if host_memory is None else read_bytes(host_memory, "host memory"),
        multiplies_in_fp8=fp8,
        **{name: value for name, value in settings.items() if value is not None},
    )


def _check_counts(**numbers: int | None) -> None:
    for name, value in numbers.items():
        check_count("devices" if name == "devices_per_node" else name, value, f"plan({name}={value!r})")
