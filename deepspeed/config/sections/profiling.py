"""``flops_profiler``, ``comms_logger``, ``trace`` and ``timers``."""

from __future__ import annotations

from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, FilePath, Float, Int, TextList

_ONE_STEP = "one step is profiled; profile_step says which"


class FlopsProfilerSection(Section):
    """Counts operations, parameters and time of one step, module by module."""

    enabled: Bool = key(False, "Profile one step; turns wall_clock_breakdown on.")
    profile_step: Int = key(1, "The step profiled, counted from 1.", unit="steps", above=0)
    module_depth: Int = key(-1, "Depth of the table; -1 is the deepest.", minimum=-1)
    top_modules: Int = key(1, "Modules shown per depth.", above=0)
    detailed: Bool = key(True, "A line per module.")
    output_file: FilePath = key(None, "File for the report.", null_means="standard output")
    recompute_fwd_factor: Float = key(
        0.0, "Forward passes repeated in backward; 1 with full activation checkpointing.", minimum=0
    )
    start_step: Int | None = key(None, "From release 0.3.11.", minimum=0, removed="0.3.12", no_effect=_ONE_STEP)
    end_step: Int | None = key(None, "From release 0.3.11.", minimum=0, removed="0.3.12", no_effect=_ONE_STEP)


class CommsLogger(Section):
    """Logs collectives with their sizes and times."""

    enabled: Bool = key(False, "Log collectives.")
    prof_all: Bool = key(True, "All operations; false takes those of prof_ops.")
    prof_ops: TextList = key(None, "Operations logged when prof_all is false.", factory=list)
    verbose: Bool = key(False, "A line per operation as it happens.")
    debug: Bool = key(False, "Add the name of the calling function.")


class TraceSection(Section):
    """Traces a few steps of every rank with torch's profiler."""

    _feature: ClassVar[str] = "deepspeed.profiling.feature"

    path: str | None = key(None, "Folder of the traces, one per rank; null traces nothing.", null_means="no trace")
    first_step: Int = key(3, "The first step that is traced, counted from 1.", unit="steps", above=0)
    steps: Int = key(2, "Steps that are traced.", unit="steps", above=0)


class ThroughputTimerSection(Section):
    """The throughput line of the engine."""

    enabled: Bool = key(True, "Measure samples per second.")
    synchronized: Bool = key(True, "Synchronise the device for it: exact, at a small cost.")


class Timers(Section):
    """Timers that run all the time."""

    throughput: ThroughputTimerSection = key(None, "The throughput line of the engine.", factory=ThroughputTimerSection)
