"""``checkpoint``, ``datastates_ckpt`` and ``nebula``."""

from __future__ import annotations

import signal
from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Capitalized, FilePath, Float, Int, TextList


class ParallelWrite(Section):
    """Chooses which ranks write which files."""

    pipeline_stage: Bool = key(
        False,
        "Data-parallel ranks share the writing of a pipeline stage's layers.",
        no_effect="every rank writes what it owns, and nothing twice",
    )


_ONE_WRITER = "there is one writer, which streams what a rank owns to its files in chunks of 4 MiB with checksums"
_ALL_SHARE = "every rank writes what it owns, and nothing twice"


class Writer(Section):
    """Settings of upstream's fast writer; only ``decoupled`` has an effect here."""

    type: Annotated[Literal["mock", "python", "fast"], AnyCase] = key(
        "fast", "Kind of writer; mock, which writes nothing, is refused.", no_effect=_ONE_WRITER
    )
    decoupled: Bool = key(False, "Write in the background, as checkpoint.async_save does.")
    io_buffer_size: Int = key(67_108_864, "Size of the write buffer.", unit="bytes", above=0, no_effect=_ONE_WRITER)
    io_buffer_double: Bool = key(True, "Two buffers.", no_effect=_ONE_WRITER)
    show_statistics: Bool = key(
        False, "Report the speed.", no_effect="run_report and wall_clock_breakdown show how long saves take"
    )
    data_parallel: Annotated[Literal["replica", "socket", "machine"] | None, AnyCase] = key(
        None, "Which ranks share the writing.", null_means="all ranks", no_effect=_ALL_SHARE
    )
    io_multiplier: Int = key(1, "Slices per resource.", above=0, no_effect=_ALL_SHARE)


class Checkpoint(Section):
    """Controls how checkpoints are written and read."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], Capitalized] = key(
        "Warn", "What happens when ranks save under different tags."
    )
    load_universal: Bool = key(
        False, "Load the universal layout (one file per parameter), at any stage and number of ranks."
    )
    use_node_local_storage: Bool = key(
        False, "Every node writes what it needs to its own disk, for disks that nodes do not share."
    )
    parallel_write: ParallelWrite = key(None, "Which ranks write what.", factory=ParallelWrite)
    checkpoint_serialization: Bool = key(
        True,
        "Use torch's zip format for .pt files; false: the older format.",
        no_effect="tensors are written as safetensors, and the few other values always as zip",
    )
    writer: Writer | None = key(None, "Settings of upstream's fast writer.")
    keep_last: Int | None = key(
        None,
        "Tags kept in the folder; older ones are removed after a save that succeeded. Only here, not upstream.",
        unit="tags",
        above=0,
        null_means="all",
    )
    async_save: Bool = key(
        False,
        "Return from save_checkpoint when the state is copied, and write in the background. Only here, not upstream.",
    )
    verify_checksums: Bool = key(
        True, "On loading, check the checksum of every chunk that is read. Only here, not upstream."
    )


class DataStates(Section):
    """The DataStates asynchronous checkpoint engine; the section's presence turns it on."""

    host_cache_size: Float | None = key(
        None, "Host memory for copies of the states.", unit="GB", above=0, since="0.18.1"
    )


class Nebula(Section):
    """The Nebula checkpoint service."""

    enabled: Bool = key(False, "Save through Nebula.", removed="0.19.8")
    enable_nebula_load: Bool = key(True, "Load through Nebula too.", removed="0.19.8")
    nebula_load_path: FilePath = key(None, "Folder to load from.", removed="0.19.8")
    persistent_storage_path: FilePath = key(None, "Folder to save to.", removed="0.19.8")
    persistent_time_interval: Int = key(
        100, "Time between persistent copies.", unit="seconds", above=0, removed="0.19.8"
    )
    num_of_version_in_retention: Int = key(2, "Versions kept.", above=0, removed="0.19.8")


CATCHABLE = tuple(
    sorted(each.name for each in signal.Signals if each.name not in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV"))
)
"""Names of the signals that a program can wait for."""

SIGNAL_VARIABLE = "DEEPSPEED_PREEMPTION_SIGNAL"
"""The environment variable by which ``deepspeed --signal`` names one more signal."""


class Preemption(Section):
    """A run that a scheduler may stop: on a signal it finishes the step, saves, and exits with a code."""

    _feature: ClassVar[str] = "deepspeed.preemption.feature"

    enabled: Bool = key(
        False,
        "After each update, check whether a rank has received one of the signals; then all ranks save and exit. "
        "Costs one exchange of a few bytes between all ranks per update.",
    )
    save_dir: str | None = key(
        None, "Folder of checkpoints to save to and to resume from; required when enabled.", null_means="none"
    )
    signals: TextList = key(
        None,
        "Signals with which the scheduler announces the end of the process; deepspeed --signal adds one. A signal of "
        "the same kind that comes five seconds later or more ends the process at once.",
        factory=lambda: ["SIGTERM", "SIGUSR1"],
    )
    exit_code: Int = key(
        75,
        "Exit code after saving, which tells the scheduler to start the run again. 75 is a temporary failure in "
        "sysexits.h.",
        minimum=1,
        maximum=255,
    )
    resume: Bool = key(True, "Let initialize load the last checkpoint in save_dir, if there is one.")
