"""``flops_profiler``: the one step of a training that is counted."""

from __future__ import annotations

from typing import Any

from deepspeed.config.sections.monitor import FlopsProfilerSection as Settings
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler


class ProfiledStep:
    """Counts the first forward of the chosen step and reports when the step is done, on rank 0.

    Args:
        settings: The section.
        engine: The engine; its wrapped model is counted.
    """

    def __init__(self, settings: Settings, engine: Any) -> None:
        self._settings = settings
        self._engine = engine
        is_rank_0 = engine.global_rank == 0
        self.profiler = FlopsProfiler(engine.module, engine, settings.recompute_fwd_factor) if is_rank_0 else None
        self._is_done = not is_rank_0

    def before_forward(self) -> None:
        """A forward begins."""
        is_chosen = self._engine.global_steps + 1 == self._settings.profile_step
        if not self._is_done and is_chosen and self._engine.training:
            assert self.profiler is not None
            self.profiler.stop_profile()  # one that an exception left running
            self.profiler.start_profile()

    def after_forward(self) -> None:
        """The forward has ended."""
        if not self._is_done and self.profiler is not None and self.profiler.started:
            self.profiler.stop_profile()
            self._is_done = True

    def after_update(self, step: int) -> None:
        """The update number ``step`` is done."""
        if self.profiler is None or step != self._settings.profile_step or not self._is_done:
            return
        self.profiler.print_model_profile(
            step,
            self._settings.module_depth,
            self._settings.top_modules,
            self._settings.detailed,
            self._settings.output_file,
        )
