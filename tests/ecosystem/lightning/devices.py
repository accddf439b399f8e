"""Where the ranks of a Lightning test run; the one place that decides it.

Lightning's DeepSpeed strategies insist on GPUs. With a GPU for every rank of a test they get them, and nothing is
replaced; otherwise the ranks are on the CPU, behind ``examples/on_cpu.py``, which replaces that check and no more.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.harness import run_ranks

ON_CPU = Path(__file__).resolve().parents[3] / "examples" / "on_cpu.py"

T = TypeVar("T")


def has_gpus(ranks: int) -> bool:
    """Whether every one of ``ranks`` ranks can have a GPU of its own."""
    return torch.cuda.device_count() >= ranks


def run_on_devices(body: Callable[..., T], ranks: int, *args: Any, timeout: float) -> list[T]:
    """:func:`run_ranks` on GPUs if there are enough, else on the CPU. Bodies begin with :func:`admit_ranks`."""
    if has_gpus(ranks):
        # In new processes: what a test with more ranks than GPUs has replaced stays replaced in its own.
        return run_ranks(body, ranks, *args, timeout=timeout, backend="cpu:gloo,cuda:nccl", fresh="interpreter")
    return run_ranks(body, ranks, *args, timeout=timeout, env={"DS_ACCELERATOR": "cpu"})


def admit_ranks(ranks: int, library: str = "lightning") -> None:
    """Lets Lightning accept this process as one of ``ranks`` ranks: on GPUs it does by itself.

    Args:
        ranks: Ranks of the test.
        library: ``lightning`` or ``pytorch_lightning``.
    """
    if not has_gpus(ranks):
        runpy.run_path(str(ON_CPU))["REPLACEMENTS"][library]()
