"""The version, torch and the operators at upstream's import path."""

from __future__ import annotations

import torch
from packaging.version import Version

from deepspeed import git_branch, git_hash, version
from deepspeed.ops.op_builder.all_ops import COMPATIBLE


def _major_minor(text: str | None) -> str:
    """Returns ``"2.13"`` of ``"2.13.0+cpu"``; ``"0.0"`` for nothing."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"


compatible_ops = installed_ops = COMPATIBLE  # what is compatible needs no installation
torch_info = {
    "version": _major_minor(torch.__version__),
    "cuda_version": _major_minor(torch.version.cuda),
    "hip_version": _major_minor(torch.version.hip),
}


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Returns whether torch is within two versions, both inclusive; builds of one release (``+cpu``) are equal.

    Args:
        min_version: Least version, as ``2.4`` or ``"2.10"``; None: any.
        max_version: Greatest version; None: any.

    Raises:
        ValueError: Neither is given, so the result would have no meaning.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version, max_version or both")
    present = Version(Version(torch.__version__).base_version)
    return (min_version is None or present >= Version(str(min_version))) and (
        max_version is None or present <= Version(str(max_version))
    )


__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
