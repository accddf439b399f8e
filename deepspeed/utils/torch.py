"""Questions about torch."""

from __future__ import annotations

import torch
from packaging.version import Version


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is within two versions, both inclusive; builds of one release (``+cpu``) are equal.

    Args:
        min_version: Least version, as ``2.4`` or ``"2.10"``; None: any.
        max_version: Greatest version; None: any.

    Raises:
        ValueError: Neither is given, so that the answer would mean nothing.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version, max_version or both")
    present = Version(Version(torch.__version__).base_version)
    return (min_version is None or present >= Version(str(min_version))) and (
        max_version is None or present <= Version(str(max_version))
    )
