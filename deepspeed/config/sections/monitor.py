"""``tensorboard``, ``csv_monitor``, ``wandb``, ``comet`` and ``run_report``."""

from __future__ import annotations

from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int


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
    experiment_key: str | None = key(None, "Key of an experiment to go on with.")
    online: Bool | None = key(None, "Report while running.", null_means="Comet decides")
    mode: str | None = key(None, "Comet's start mode.")


class RunReport(Section):
    """A page about the run: where the time of its steps went, rank by rank."""

    _feature: ClassVar[str] = "deepspeed.run_report.feature"

    path: str | None = key(
        None, "Folder of the files that each rank writes, and of the page; null writes nothing.", null_means="no report"
    )
    plan: str | None = key(
        None, "File that ds_plan --json wrote; the page shows it beside the run.", null_means="no plan"
    )
