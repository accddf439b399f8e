"""What the engine does for the section ``run_report``: each rank writes a line about each of its steps."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.job.mesh import PIPE
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, TrackingHooks
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.release import VERSION
from deepspeed.run_report.page import report_if_small
from deepspeed.run_report.rank_file import open_folder
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import PLAN
from deepspeed.run_report.stragglers import StragglerWatch
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime


class RunReportFeature(EngineFeature):
    """A page about the run."""

    title = "run report"
    setting = "run_report"
    only_watches = True

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.run_report
        if section.path is None:
            return
        folder = open_folder(Path(section.path), comm.get_rank())
        if section.plan is not None and comm.get_rank() == 0:
            try:
                shutil.copyfile(section.plan, folder / PLAN)
            except OSError as error:
                raise DeepSpeedConfigError(
                    f"run_report.plan={section.plan!r}: expected the file of ds_plan --json, found: {error.strerror}. "
                    "Make it with ds_plan, or leave the key out"
                ) from error

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        if setup.root.run_report.path is None:
            return None
        rank, folder = comm.get_rank(), Path(setup.root.run_report.path)
        # By the first rank, so that the page is there when the program has ended, also by an exception.
        on_close = partial(report_if_small, folder) if rank == 0 else None
        world_size = comm.get_world_size()
        watch = StragglerWatch(folder, world_size) if rank == 0 and world_size > 1 else None
        after_step = None if watch is None else watch.after_step
        return TrackingHooks(
            StepRecorder(folder, rank, _facts(setup, runtime), on_close=on_close, after_step=after_step)
        )


FEATURE = RunReportFeature()


def _facts(setup: EngineSetup, runtime: ZeroRuntime) -> dict[str, Any]:
    mesh, rank = setup.ranks.mesh, comm.get_rank()
    given, defaults = settings_of(setup.root)
    return {
        "world_size": comm.get_world_size(),
        "axes": mesh.sizes,
        "stage": mesh.coordinate(rank).get(PIPE, 0),
        "host": platform.node(),
        "pid": os.getpid(),
        "device": get_accelerator().device_name(setup.device.index),
        "parameters": sum(bucket.used_numel for bucket in runtime.layout.buckets),
        "versions": {
            "deepspeed": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        "config": given,
        "defaults": defaults if rank == 0 else {},
    }


_SECRETS = ("api_key",)


def settings_of(root: Root) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys that differ from their defaults, and the others, by dotted path."""
    given = _flat(root.model_dump(mode="json", exclude_defaults=True))
    given.update({path: "(not shown)" for path in given if path.rpartition(".")[2] in _SECRETS})
    everything = _flat(root.model_dump(mode="json"))
    return given, {path: value for path, value in everything.items() if path not in given}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found
