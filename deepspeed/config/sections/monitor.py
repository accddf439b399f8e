"""``tensorboard``, ``csv_monitor``, ``wandb``, ``comet`` and ``run_report``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, FilePath, Float, Int, TextList

SECRETS = ("api_key",)
"""Keys whose values are neither shown nor stored."""

NOT_SHOWN = "(not shown)"
"""What stands in the place of such a value."""


def hide_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts with :data:`NOT_SHOWN` in the place of secrets; those that are not set stay."""
    return {
        name: hide_secrets(value) if isinstance(value, Mapping) else NOT_SHOWN if name in SECRETS and value else value
        for name, value in values.items()
    }


class TensorBoard(Section):
    """Scalars as TensorBoard events."""

    enabled: Bool = key(False, "Write events.")
    output_path: str = key("", "Parent folder of the events; empty is the working directory.")
    job_name: str = key("DeepSpeedJobName", "Folder of this run below output_path.")


class CsvMonitor(Section):
    """Scalars as CSV files, one per value."""

    enabled: Bool = key(False, "Write CSV files.")
    output_path: str = key("", "Parent folder of the files; empty is the working directory.")
    job_name: str = key("DeepSpeedJobName", "Folder of this run below output_path.")


class Wandb(Section):
    """Scalars to Weights & Biases."""

    enabled: Bool = key(False, "Report to Weights & Biases.")
    group: str | None = key(None, "Group of runs.")
    team: str | None = key(None, "Team (entity) that owns the run.")
    project: str = key("deepspeed", "Project.")
    name: str | None = key(
        None, "From early releases.", no_effect="name the run with the environment variable WANDB_NAME"
    )


class Comet(Section):
    """Scalars to Comet."""

    enabled: Bool = key(False, "Report to Comet.")
    samples_log_interval: Int = key(100, "Samples between reports.", unit="samples", above=0)
    project: str | None = key(None, "Project.")
    workspace: str | None = key(None, "Workspace.")
    api_key: str | None = key(None, "Key of the service; better kept in Comet's own configuration.")
    experiment_name: str | None = key(None, "Name of the experiment.")
    experiment_key: str | None = key(None, "Key of an experiment to continue.")
    online: Bool | None = key(None, "Report while running.", null_means="Comet decides")
    mode: str | None = key(None, "Comet's start mode.")


class RunReport(Section):
    """A page about the run: where the time of its steps went, rank by rank."""

    _feature: ClassVar[str] = "deepspeed.run_report.feature"

    path: str | None = key(
        None, "Folder for the files that each rank writes, and for the page.", null_means="no report"
    )
    plan: str | None = key(
        None, "File that ds_plan --json wrote; the page shows it beside the run.", null_means="no plan"
    )
    stragglers: Bool = key(
        False,
        "Log a line when a rank stays slow, also without path: ranks post their latest steps at the rendezvous store.",
    )


_ONE_STEP = "one step is profiled; profile_step chooses it"


class FlopsProfilerSection(Section):
    """Counts operations, parameters and time of one step, module by module."""

    enabled: Bool = key(False, "Profile one step; turns wall_clock_breakdown on.")
    profile_step: Int = key(
        1, "The profiled step, counted from 1; 0 is the first too, -1 profiles none.", unit="steps", minimum=-1
    )
    module_depth: Int = key(-1, "Depth of modules in the table; -1: all levels.", minimum=-1)
    top_modules: Int = key(1, "Modules shown per depth.", above=0)
    detailed: Bool = key(True, "Print a line per module.")
    output_file: FilePath = key(None, "File for the report.", null_means="standard output")
    recompute_fwd_factor: Float = key(
        0.0, "Forward passes repeated in backward; 1 with full activation checkpointing.", minimum=0
    )
    start_step: Int | None = key(None, "From release 0.3.11.", minimum=0, removed="0.3.12", no_effect=_ONE_STEP)
    end_step: Int | None = key(None, "From release 0.3.11.", minimum=0, removed="0.3.12", no_effect=_ONE_STEP)


class CommsLogger(Section):
    """Logs collectives with their sizes and times."""

    enabled: Bool = key(False, "Log collectives.")
    prof_all: Bool = key(True, "true: log all operations. false: only those in prof_ops.")
    prof_ops: TextList = key(None, "Operations to log if prof_all is false.", factory=list)
    verbose: Bool = key(False, "Log one line per operation when it happens.")
    debug: Bool = key(False, "Add the name of the calling function.")


class TraceSection(Section):
    """Traces a few steps of every rank with torch's profiler."""

    _feature: ClassVar[str] = "deepspeed.profiling.feature"

    path: str | None = key(None, "Folder for the traces, one file per rank.", null_means="no trace")
    first_step: Int = key(3, "First traced step, counted from 1.", unit="steps", above=0)
    steps: Int = key(2, "Number of traced steps.", unit="steps", above=0)


class ThroughputTimerSection(Section):
    """The throughput line of the engine."""

    enabled: Bool = key(True, "Measure samples per second.")
    synchronized: Bool = key(True, "Synchronize the device for it: exact, at a small cost.")


class Timers(Section):
    """Timers that are always on."""

    throughput: ThroughputTimerSection = key(None, "The throughput line of the engine.", factory=ThroughputTimerSection)
