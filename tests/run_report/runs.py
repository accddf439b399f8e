"""Files of a run that never ran."""

from pathlib import Path

from deepspeed.run_report.rank_file import RankFile


def step_line(number: int, seconds: float = 1.0, forward: float = 0.4, wait: float = 0.1, **more) -> dict:
    """A step that takes ``forward`` (of it ``wait`` for others), and the rest outside the engine."""
    return {
        "step": number,
        "seconds": seconds,
        "phases": {"forward": forward, "outside": seconds - forward},
        "waits": {"forward": {"data": wait}},
        "batch": 8,
        "tokens": 128,
        "memory": 2**30,
        "bytes": {"data": 1000},
        **more,
    }


def write_rank(folder: Path, rank: int, steps: list[dict], *, has_ended: bool = True, **facts) -> RankFile:
    """Writes the file of a rank."""
    file = RankFile(folder, rank)
    file.write("start", rank=rank, host=f"node{rank}", axes={"data": 2}, **facts)
    for line in steps:
        file.write("step", **line)
    if has_ended:
        file.write("end")
    file.close()
    return file
