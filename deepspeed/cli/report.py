"""``ds_report``: shows what is installed, the devices of this machine, and which features work on it."""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import DeepSpeedAccelerator, cpu_has_bf16, get_accelerator, host_memory
from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.cli.command import run_command
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.launcher.devices import usable_cores
from deepspeed.missing_features import FEATURES

# Wide enough for a path; a terminal's own width wins.
_WIDTH_WITHOUT_TERMINAL = 120
_COLORS = {"yes": "green", "slow": "yellow", "no": "red"}
GIB = 1 << 30
# Data-loader workers pass batches through this folder; if it is smaller, large batches end them with a bus error.
_SMALL_SHARED_MEMORY = GIB
_OPTIONAL_PACKAGES = ("triton", "transformers", "accelerate", "lightning", "tensorboard", "matplotlib")
_REQUIRED_PACKAGES = ("numpy", "pydantic", "safetensors", "rich", "psutil", "hjson")


def main(args: Sequence[str] | None = None) -> None:
    """Prints the report."""
    run_command("ds_report", lambda: _report(_parse_args(args)), args)


def _report(options: argparse.Namespace) -> None:
    facts = collect()
    features, with_warnings = not options.hide_operator_status, not options.hide_errors_and_warnings
    if options.json:
        sys.stdout.write(json.dumps(facts.to_dict(features=features, warnings=with_warnings), indent=2) + "\n")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    show(facts, console, features=features, warnings=with_warnings)


def _parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the list of what can be used")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the warnings")
    return parser.parse_args(args)


def show(facts: EnvironmentInfo, console: Console, *, features: bool = True, warnings: bool = True) -> None:
    """Prints ``facts`` as tables, with ``features`` what works here or not. The longest comes first."""
    if features:
        console.print(_pairs("Not in this release, and what to do instead", facts.missing))
        console.print(_usable(facts.usable))
    console.print(_pairs("This machine", facts.machine))
    console.print(_pairs("Versions", facts.versions))
    if warnings:
        for sentence in facts.warnings:
            console.print(Text(f"warning: {sentence}", style="yellow"))


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=False, max_width=72)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _usable(rows: Iterable[FeatureStatus]) -> Table:
    table = Table(title="What can be used here", title_justify="left", min_width=60)
    for heading in ("feature", "usable", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(Text(row.feature), Text(row.verdict, style=_COLORS[row.verdict]), Text(row.reason))
    return table


@dataclass(frozen=True)
class FeatureStatus:
    """Whether one feature works on this machine."""

    feature: str  # name of the feature
    verdict: str  # ``"yes"``, ``"slow"`` or ``"no"``
    reason: str  # the reason, and what would change it


@dataclass(frozen=True)
class EnvironmentInfo:
    """Everything the report shows."""

    versions: list[tuple[str, str]]  # name and version of each program and package
    machine: list[tuple[str, str]]  # name and value of each property of this machine
    usable: list[FeatureStatus]  # features and whether they work here
    missing: list[tuple[str, str]]  # features that this release lacks, with alternatives
    warnings: list[str] = field(default_factory=list)  # one sentence per likely problem

    def to_dict(self, *, features: bool = True, warnings: bool = True) -> dict[str, Any]:
        """Returns the facts for JSON; arguments as in :func:`show`."""
        found: dict[str, Any] = {"machine": dict(self.machine), "versions": dict(self.versions)}
        if features:
            found |= {"usable": list(map(asdict, self.usable)), "missing": dict(self.missing)}
        return {**found, "warnings": self.warnings} if warnings else found


def collect() -> EnvironmentInfo:
    """Collects all facts. Reads the memory of every device, which creates a context on it."""
    warnings = list(_machine_warnings())
    try:
        accelerator = get_accelerator()
    except DeepSpeedConfigError as error:
        warnings.insert(0, f"{error}. This report continues with the CPU.")
        accelerator = CPUAccelerator()
    missing = [(feature.title, feature.instead) for feature in FEATURES]
    return EnvironmentInfo(_versions(), _machine(accelerator), _find_usable(accelerator), missing, warnings)


def _versions() -> list[tuple[str, str]]:
    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    rows = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("deepspeed", f"{deepspeed.__version__} ({Path(deepspeed.__file__).parent})"),
        ("commit of deepspeed", f"{deepspeed.__git_hash__} (branch {deepspeed.__git_branch__})"),
        ("distribution deepspeed", installed("deepspeed")),
        ("torch", f"{torch.__version__} ({Path(torch.__file__).parent})"),
        ("CUDA of torch", torch.version.cuda or "none: torch was built without it"),
    ]
    if torch.version.hip:
        rows.append(("ROCm of torch", torch.version.hip))
    rows.append(("NCCL of torch", _nccl_version() or "none: torch was built without it"))
    return rows + [(package, installed(package)) for package in (*_REQUIRED_PACKAGES, *_OPTIONAL_PACKAGES)]


def _nccl_version() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a build for the CPU, or for a system without NCCL
        if not torch.cuda.nccl.is_available([]):
            return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _machine(accelerator: DeepSpeedAccelerator) -> list[tuple[str, str]]:
    rows = [
        ("host", socket.gethostname()),
        ("system", platform.platform()),
        ("processor", f"{_processor()}, {usable_cores()} usable core(s)"),
        ("native bf16 in the processor", "yes" if cpu_has_bf16() else "no"),
        ("memory", _free_of(host_memory.available_bytes(), host_memory.total_bytes())),
    ]
    shared = host_memory.shared_memory_bytes()
    rows.append(("/dev/shm", "not there" if shared is None else _free_of(shared[1], shared[0])))
    chosen = f" (DS_ACCELERATOR={os.environ['DS_ACCELERATOR']})" if os.environ.get("DS_ACCELERATOR") else ""
    rows.append(("accelerator", accelerator.device_name() + chosen))
    rows.append(("communication backend", accelerator.communication_backend_name() or "none"))
    for variable in accelerator.visible_devices_envs():
        rows.append((variable, os.environ.get(variable, "not set")))
    if accelerator.device_name() != "cpu":
        indices = range(accelerator.device_count())
        rows += [(accelerator.device_name(index), _device(accelerator, index)) for index in indices]
    return rows


def _device(accelerator: DeepSpeedAccelerator, index: int) -> str:
    module = torch.get_device_module(accelerator.device_name())
    name = module.get_device_name(index) if hasattr(module, "get_device_name") else "device"
    try:
        memory = _free_of(accelerator.available_memory(index), accelerator.total_memory(index))
    except RuntimeError as error:  # a device that another process holds exclusively, or that is broken
        memory = f"does not answer: {str(error).splitlines()[0]}"
    return f"{name}, {memory}"


def _free_of(free: int, total: int) -> str:
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _find_usable(accelerator: DeepSpeedAccelerator) -> list[FeatureStatus]:
    return [
        FeatureStatus("ZeRO stages 0, 1, 2, 3", "yes", ""),
        _precision("bf16", torch.bfloat16, accelerator, accelerator.is_bf16_supported()),
        _precision("fp16", torch.float16, accelerator, accelerator.is_fp16_supported()),
        _collectives(accelerator),
        _simple("several ranks on this machine", hasattr(os, "fork"), "the deepspeed command needs a POSIX system"),
        _other_machines(),
        _compile(accelerator),
        _triton(accelerator),
    ]


def _simple(feature: str, usable: bool, otherwise: str) -> FeatureStatus:
    return FeatureStatus(feature, "yes", "") if usable else FeatureStatus(feature, "no", otherwise)


def _other_machines() -> FeatureStatus:
    feature = "ranks on other machines"
    programs = [name for name in ("pdsh", "ssh", "mpirun", "srun") if shutil.which(name)]
    if programs:
        return FeatureStatus(feature, "yes", f"with {', '.join(programs)}, or --no_ssh on each machine")
    return FeatureStatus(feature, "yes", "with --no_ssh on each machine; pdsh, ssh, mpirun and srun are not in PATH")


def _precision(name: str, dtype: torch.dtype, accelerator: DeepSpeedAccelerator, is_supported: bool) -> FeatureStatus:
    device = accelerator.device_name()
    if not is_supported:
        return FeatureStatus(f"{name} training", "no", f"{device} has no {name}; use {_others(dtype, accelerator)}")
    if accelerator.emulates(dtype):
        reason = f"{device} has no {name} instructions; {_others(dtype, accelerator)} is faster here"
        return FeatureStatus(f"{name} training", "slow", reason)
    return FeatureStatus(f"{name} training", "yes", "")


def _others(dtype: torch.dtype, accelerator: DeepSpeedAccelerator) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float: "fp32"}
    usable = [
        other for other in accelerator.supported_dtypes() if other is not dtype and not accelerator.emulates(other)
    ]
    return " or ".join(names[other] for other in reversed(usable))


def _collectives(accelerator: DeepSpeedAccelerator) -> FeatureStatus:
    backend = accelerator.communication_backend_name()
    feature = f"collectives ({backend})"
    if not comm.is_available():
        return FeatureStatus(feature, "no", "torch was built without torch.distributed; one rank works")
    if backend == "nccl" and _nccl_version() is None:
        return FeatureStatus(feature, "no", "torch was built without NCCL; one rank works")
    return _simple(feature, backend is not None, f"torch has none between {accelerator.device_name()} devices")


def _compile(accelerator: DeepSpeedAccelerator) -> FeatureStatus:
    feature = "torch.compile (optional)"
    if accelerator.device_name() == "cpu":
        found = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
        return _simple(feature, found, "on the CPU it needs a C++ compiler in PATH; nothing else here does")
    return _simple(feature, _has_triton(), "it needs the package triton")


def _triton(accelerator: DeepSpeedAccelerator) -> FeatureStatus:
    feature = "Triton kernels (optional)"
    if not accelerator.is_triton_supported():
        return FeatureStatus(feature, "no", f"not for {accelerator.device_name()}; torch's own kernels are used")
    return _simple(feature, _has_triton(), "the package triton is not installed; torch's own kernels are used")


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _machine_warnings() -> Iterator[str]:
    shared = host_memory.shared_memory_bytes()
    if shared is not None and shared[0] < _SMALL_SHARED_MEMORY:
        yield (
            f"/dev/shm has only {shared[0] / GIB:.2f} GiB: data-loader workers may end with a bus error; "
            "give it more (docker: --shm-size=8g, or --ipc=host)"
        )
    if glob.glob("/dev/nvidia[0-9]*") and torch.cuda.device_count() == 0:
        reason = "torch was built without CUDA" if torch.version.cuda is None else "the driver or CUDA_VISIBLE_DEVICES"
        yield f"this machine has NVIDIA devices but torch sees none of them: {reason}; training would use the CPU"


if __name__ == "__main__":
    main()
