"""The engine feature of the section ``trace``: each rank traces a few of its steps."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from deepspeed import comm
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, TrackingHooks
from deepspeed.profiling.step_trace import TraceRecorder
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime


class TraceFeature(EngineFeature):
    """Traces a few steps of each rank if ``trace.path`` is set."""

    title = "trace"
    setting = "trace"
    only_watches = True

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        section = setup.root.trace
        if section.path is None:
            return None
        return TrackingHooks(TraceRecorder(Path(section.path), comm.get_rank(), section.first_step, section.steps))


FEATURE = TraceFeature()
