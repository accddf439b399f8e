"""``deepspeed.plan(...)``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.advice import advise
from deepspeed.plan.configs import read_config
from deepspeed.plan.degrees import at_degrees
from deepspeed.plan.devices import Device, Machine, find_device, read_bytes
from deepspeed.plan.longest import longest_sequence
from deepspeed.plan.models import model_source
from deepspeed.plan.pipeline import pipeline_of
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request


def plan(
    model: Any,
    config: Any,
    *,
    nodes: int = 1,
    devices_per_node: int = 1,
    device: str | Device = "h100",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    sequence_length: int = 2048,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    inputs: Any = None,
    activation_checkpointing: bool = False,
    compare_checkpointing: bool = True,
    suggest: bool = True,
    flops: float | None = None,
    link: float | None = None,
    host_link: float | None = None,
    network: float | None = None,
    disk: float | None = None,
    headroom: float | None = None,
    rank: int | None = None,
    pipe: int = 1,
    tensor: int | None = None,
    sequence: int | None = None,
    ep: int | None = None,
    schedule: str | None = None,
    num_chunks: int | None = None,
    longest: bool = False,
) -> Plan:
    """Says what each rank of a training will hold and move, by running the engine on tensors without values.

    Nothing of the model's size is allocated, no device and no process group is used. Runs in one process.

    Args:
        model: A module (left alone), a callable that returns one or ``(model, inputs)``, ``"module:callable"``, a
            folder or JSON file with a transformers configuration, such a configuration, or a ``DecoderShape``.
        config: The configuration: a dict, a path, or base64.
        nodes: Number of nodes.
        devices_per_node: Devices of each.
        device: Name in the table of devices, ``"cpu"`` for training on processors, or a :class:`Device`.
        device_memory: Bytes of one device, or text with a unit such as ``"80GB"``; None: the device's.
        host_memory: Bytes of one node's host memory, or text with a unit; None: not compared.
        sequence_length: Tokens of a sample.
        micro_batch: Samples per forward and rank; None: the configuration's.
        accumulation: Micro-batches of a step and rank; None: the configuration's.
        inputs: What the model's forward gets: a callable of ``(micro_batch, sequence_length)`` or its result.
        activation_checkpointing: Repeated blocks keep their inputs only and run again in backward.
        compare_checkpointing: Also find the activations with the other setting.
        suggest: If it does not fit, look for changes that make it fit.
        flops: Operations per second of a device; None: the table's.
        link: Bytes per second and direction between devices of a node; None: the table's.
        host_link: Bytes per second and direction between device and host; None: the table's.
        network: Bytes per second and direction between nodes, per device; None: 50e9.
        disk: Bytes per second of a node's disk; None: 5e9.
        headroom: Share of device memory left to driver, communication library and fragmentation; None: 0.05.
        rank: The simulated rank; None: the second, with a pipeline one of each kind of stage.
        pipe: Stages of a pipeline; the model is a ``DecoderShape`` or a decoder-only one of Transformers.
        tensor: Ranks that share layers; None: as the configuration says.
        sequence: Ranks that share a sequence; None: as the configuration says.
        ep: Ranks that share experts; None: as the configuration says.
        schedule: Of the pipeline; None: as the configuration says, or ``1f1b``.
        num_chunks: Chunks per stage; None: as the configuration says, or as few as the schedule can have.
        longest: Look for the longest sequences that fit; the plan's ``request.sequence_length`` is the answer, a
            multiple of 1024 tokens. ``sequence_length`` and ``compare_checkpointing`` do not matter then.

    Raises:
        DeepSpeedConfigError: The configuration cannot run, the model cannot be built without values, or a quantity has
            no unit.
    """
    _refuse_below_one(nodes=nodes, devices_per_node=devices_per_node, sequence_length=sequence_length, pipe=pipe)
    optional = {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "tensor": tensor,
        "sequence": sequence,
        "ep": ep,
    }
    _refuse_below_one(**{name: value for name, value in optional.items() if value is not None})
    machine = make_machine(
        device,
        nodes=nodes,
        devices_per_node=devices_per_node,
        device_memory=device_memory,
        host_memory=host_memory,
        flops=flops,
        link=link,
        host_link=host_link,
        network=network,
        disk=disk,
        headroom=headroom,
    )
    if rank is not None and rank not in range(machine.ranks):
        raise DeepSpeedConfigError(f"plan(rank={rank!r}): expected a whole number from 0 to {machine.ranks - 1}")
    settings = read_config(config)
    request = Request(
        source=model_source(model, inputs),
        config=settings,
        machine=machine,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=activation_checkpointing,
        kind="cpu" if machine.device.name == "cpu" else "cuda",
        rank=rank,
        pipeline=pipeline_of(settings, pipe, schedule, num_chunks),
    )
    request = at_degrees(request, tensor=tensor, sequence=sequence, ep=ep)
    if longest:
        return longest_sequence(request)
    made = make_plan(request, compare=compare_checkpointing)
    if suggest and not made.fits:
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
) -> Machine:
    """Puts the machine of :func:`plan` together; arguments as there.

    Raises:
        DeepSpeedConfigError: A rate is not above 0, ``headroom`` is no share, or the memory of the device is not known.
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
    settings = {"network": network, "disk": disk, "headroom": headroom}
    return Machine(
        device=found,
        nodes=nodes,
        devices_per_node=devices_per_node,
        device_memory=own_memory or found.memory,
        host_memory=None if host_memory is None else read_bytes(host_memory, "host memory"),
        **{name: value for name, value in settings.items() if value is not None},
    )


def _refuse_below_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DeepSpeedConfigError(f"plan({name}={value!r}): expected a whole number of 1 or more")
