"""Counts floating-point operations: of the step that ``flops_profiler`` names, and for the MFU of the step line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.devices import device_of_product
from deepspeed.config.sections.monitor import FlopsProfilerSection as Settings
from deepspeed.engine.compiled_parts import CompiledPart
from deepspeed.logging import log_dist
from deepspeed.profiling.flops_profiler.profile import OperationCounter
from deepspeed.profiling.flops_profiler.profiler import BACKWARD_FACTOR, FlopsProfiler


class ProfiledStep:
    """Counts the first forward of the chosen step and reports when the step is done, on rank 0."""

    def __init__(self, settings: Settings, engine: Any) -> None:
        self._settings = settings
        self._engine = engine
        is_rank_0 = engine.global_rank == 0
        self.profiler = FlopsProfiler(engine.module, engine, settings.recompute_fwd_factor) if is_rank_0 else None
        self._is_done = not is_rank_0
        self._step = settings.profile_step or 1

    def before_forward(self) -> None:
        """Starts the profiler if the step is the chosen one. Called before each forward."""
        is_chosen = self._engine.global_steps + 1 == self._step
        if not self._is_done and is_chosen and self._engine.training:
            assert self.profiler is not None
            self.profiler.stop_profile()  # an exception may have left it running
            self.profiler.start_profile()

    def after_forward(self) -> None:
        """Stops the profiler. Called after each forward."""
        if not self._is_done and self.profiler is not None and self.profiler.started:
            self.profiler.stop_profile()
            self._is_done = True

    def after_update(self, step: int) -> None:
        """Prints the profile once update ``step`` is done."""
        if self.profiler is None or step != self._step or not self._is_done:
            return
        settings = self._settings
        shown = (step, settings.module_depth, settings.top_modules, settings.detailed)
        try:
            self.profiler.print_model_profile(*shown, settings.output_file)
        except OSError as error:
            if settings.output_file is None:
                raise
            # Only this rank writes, so an exception would leave the others waiting for it.
            path = settings.output_file
            message = f"flops_profiler.output_file: the profile is printed, since {path} could not be written: {error}"
            log_dist(message, level=logging.ERROR)
            self.profiler.print_model_profile(*shown)


class FlopsCounter:
    """The operations of this rank's matrix products per token, for model FLOPs utilization (MFU).

    Counted in one training forward, without what recomputation repeats; a backward counts as two forwards (PaLM,
    Appendix B). Nothing is counted on a device that the table of devices does not have, such as a processor, nor in a
    compiled model, since torch does not compile while operations are counted.
    """

    def __init__(self, is_wanted: bool) -> None:
        device = device_of_product(get_accelerator().device_name()) if is_wanted else None
        # bf16 operations per second of this rank's device; None: MFU is not known
        self.peak = None if device is None else device.flops
        self._per_unit: float | None = None
        self._units = 0

    def before_forward(self, units: int) -> None:
        """Records that the next forward trains, on this many tokens, or on 1 micro-batch."""
        self._units = units

    @contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Counts what runs inside if it is the first training forward."""
        if self.peak is None or self._per_unit is not None or not self._units or _is_compiled(model):
            yield
            return
        found = 0

        def add(_operations: int, products: int) -> None:
            nonlocal found
            found += 2 * products  # a multiplication and an addition each

        with OperationCounter(add):
            yield
        self._per_unit = found * (1 + BACKWARD_FACTOR) / self._units

    def operations(self, units: int) -> float | None:
        """Returns the operations of forward and backward of this many tokens, or micro-batches; None: not counted."""
        return None if self._per_unit is None else self._per_unit * units

    def share(self, units_per_second: float) -> float | None:
        """Returns the MFU at a rate of tokens, or micro-batches, of this rank; None where it is not known."""
        return None if self.peak is None or self._per_unit is None else self._per_unit * units_per_second / self.peak


def _is_compiled(model: Any) -> bool:
    if not isinstance(model, nn.Module):
        return True  # torch does not report this of a function that the program has defined
    return any(
        isinstance(m, CompiledPart) or m._compiled_call_impl is not None or hasattr(m, "_orig_mod")
        for m in model.modules()
    )
