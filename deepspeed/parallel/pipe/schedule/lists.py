"""The schedules, each a function of sizes that gives the computations of all stages."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed.parallel.pipe.schedule.actions import Action, Kind, Schedule

Lists = list[list[Action]]


def gpipe(stages: int, micro_batches: int) -> Lists:
    """All forwards, then all backwards (Huang et al. 2019)."""
    forwards = [Action(Kind.FORWARD, 0, i) for i in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, 0, i) for i in range(micro_batches)]
    return [[a._replace(chunk=stage) for a in forwards + backwards] for stage in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> Lists:
    """Forwards until the first backward can come, then in turn (Narayanan et al. 2021)."""
    lists: Lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        actions = [Action(Kind.FORWARD, stage, i) for i in range(ahead)]
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                actions.append(Action(Kind.FORWARD, stage, i + ahead))
            actions.append(Action(Kind.BACKWARD, stage, i))
        lists.append(actions)
    return lists


_LISTS: dict[str, Callable[[int, int], Lists]] = {"gpipe": gpipe, "1f1b": one_f_one_b}

# What ``PipelineModule(schedule=...)`` and ``pipeline.schedule`` accept.
TRAIN_SCHEDULES = tuple(_LISTS)


def place_chunks(name: str, stages: int, num_chunks: int = 1) -> tuple[int, ...]:
    """The stage of each chunk of the model, in order.

    Args:
        name: One of :data:`TRAIN_SCHEDULES`.
        stages: Stages of the pipeline.
        num_chunks: Chunks per stage.

    Raises:
        ValueError: The schedule does not exist or cannot have so many chunks.
    """
    if name not in _LISTS:
        raise ValueError(f"schedule={name!r} is not known; choose one of {', '.join(map(repr, TRAIN_SCHEDULES))}")
    return tuple(range(stages))


def make_schedule(name: str, stages: int, micro_batches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of that name; arguments and errors as of :func:`place_chunks`."""
    stage_of = place_chunks(name, stages, num_chunks)
    lists = _LISTS[name](stages, micro_batches)
    return Schedule(name, micro_batches, stage_of, tuple(map(tuple, lists)))


def make_inference(stage_of: tuple[int, ...], micro_batches: int) -> Schedule:
    """Forwards only, with the chunks where training has them; a stage does its chunks one after the other."""
    lists: Lists = [[] for _ in range(max(stage_of) + 1)]
    for chunk, stage in enumerate(stage_of):
        lists[stage] += [Action(Kind.FORWARD, chunk, i) for i in range(micro_batches)]
    return Schedule("inference", micro_batches, stage_of, tuple(map(tuple, lists)))
