"""The version, torch and the operators by upstream's path."""

from __future__ import annotations

import torch

from deepspeed import git_branch, git_hash, version
from deepspeed.ops.native import COMPATIBLE


def _major_minor(text: str | None) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``; ``"0.0"`` for nothing."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"


compatible_ops = installed_ops = COMPATIBLE  # what is compatible needs no installation
torch_info = {
    "version": _major_minor(torch.__version__),
    "cuda_version": _major_minor(torch.version.cuda),
    "hip_version": _major_minor(torch.version.hip),
}

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
