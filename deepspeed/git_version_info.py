"""The versions of this package and of torch, and the operators, under the import path of upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from deepspeed import git_branch, git_hash, version
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.all_ops import COMPATIBLE


def _major_minor(text: str | None) -> str:
    """Returns ``"2.13"`` for ``"2.13.0+cpu"``; ``"0.0"`` for None."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"


accelerator_name: str  # see __getattr__
compatible_ops = installed_ops = COMPATIBLE  # nothing needs to be installed
torch_info = {
    "version": _major_minor(torch.__version__),
    "cuda_version": _major_minor(torch.version.cuda),
    "hip_version": _major_minor(torch.version.hip),
}


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Returns whether torch's release is from min to max, None open. Raises ValueError: neither is given."""
    if min_version is None and max_version is None:
        raise ValueError(
            "required_torch_version(): expected a version, found none; give min_version, max_version or both"
        )
    present = Version(Version(torch.__version__).base_version)
    return (min_version is None or present >= Version(str(min_version))) and (
        max_version is None or present <= Version(str(max_version))
    )


__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Selects the accelerator at the first access of its name, not at the import of this module."""
        if name == "accelerator_name":
            return get_accelerator().device_name()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
