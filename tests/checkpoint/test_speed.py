"""Saving runs at the speed of the disk and needs next to no memory; loading reads what it needs.

``benchmarks/checkpoint.py`` measures; its report is in ``benchmarks/results``.
"""

import pytest

from benchmarks.checkpoint import MIB, measure
from tests.harness import run_ranks


@pytest.mark.slow
def test_saving_is_as_fast_as_writing(tmp_path):
    """The best of several interleaved rounds, because other programs use the disk too."""
    (result,) = run_ranks(measure, 1, str(tmp_path), 48, 1, 8, timeout=280, fresh="interpreter")
    ours, plain, total = min(result["times"]["save"]), min(result["times"]["plain"]), result["total"]
    assert total > 570 * MIB
    assert plain / ours > 0.9, f"saving {total / ours / 1e9:.2f} GB/s, writing {total / plain / 1e9:.2f}"


def test_memory_of_saving_and_loading(tmp_path):
    """200 MB of masters and states per rank, in buckets of 16 MiB: saving holds at most a bucket of it twice."""
    for result in run_ranks(measure, 2, str(tmp_path), 8, 3, 1, 2048, fresh=True):
        assert result["bucket"] < 17 * MIB < result["total"] / 20
        assert result["grown"]["save"] <= result["bucket"], f"{result['grown']['save'] / MIB:.0f} MiB"
        assert result["grown"]["load"] < 48 * MIB, f"{result['grown']['load'] / MIB:.0f} MiB"
        # Its own share, once for the checksums and once to copy it.
        assert result["read"] < 1.1 * result["total"]
