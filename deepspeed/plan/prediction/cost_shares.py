"""What would help most: the step predicted again with one cost after the other turned off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepspeed.accelerator.devices import Device
from deepspeed.plan.prediction.step import PredictedStep, StepSetup, predict_step

_MUCH = 1e6  # times as fast: what it takes is nothing then


def costs_turned_off(step: PredictedStep) -> list[tuple[str, float]]:
    """Returns what would help and the seconds that it would save, the most helpful first.

    Args:
        step: The step.
    """
    found = [(name, step.seconds - predict_step(change(step.setup)).seconds) for name, change in _CHANGES]
    if step.bubble > 0:
        found.append(("no waiting for other stages (more micro-batches, more chunks, another schedule)", step.bubble))
    if step.update > 0:
        found.append(("no update (states over more ranks)", step.update))
    return sorted(((name, saved) for name, saved in found if saved > 0.002 * step.seconds), key=lambda row: -row[1])


def _with_device(setup: StepSetup, change: Callable[[Device], Device]) -> StepSetup:
    return replace(setup, machine=replace(setup.machine, device=change(setup.machine.device)))


def _endless_links(setup: StepSetup) -> StepSetup:
    machine = replace(setup.machine, network=setup.machine.network * _MUCH)
    return replace(setup, machine=replace(machine, device=replace(machine.device, link=machine.device.link * _MUCH)))


_CHANGES: tuple[tuple[str, Callable[[StepSetup], StepSetup]], ...] = (
    ("no recomputation (more memory)", lambda s: replace(s, layout=replace(s.layout, recompute="none"))),
    ("fused elementwise operations (compile)", lambda s: replace(s, layout=replace(s.layout, is_compiled=True))),
    ("a fused loss", lambda s: replace(s, layout=replace(s.layout, has_fused_loss=True))),
    ("linear layers in fp8", lambda s: replace(s, layout=replace(s.layout, is_fp8=True))),
    (
        "norms cut along the sequence (tensor_parallel.sequence_parallel_norms)",
        lambda s: replace(s, layout=replace(s.layout, cuts_norms=s.layout.tensor > 1)),
    ),
    ("links and network without limit", _endless_links),
    (
        "memory bandwidth without limit",
        lambda s: _with_device(s, lambda d: replace(d, memory_bandwidth=d.memory_bandwidth * _MUCH)),
    ),
    (
        "a host without cost per operation",
        lambda s: _with_device(s, lambda d: replace(d, efficiency=replace(d.efficiency, launch=0.0))),
    ),
)
