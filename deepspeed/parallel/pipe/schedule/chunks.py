"""Where the chunks of a model lie, and the orders of the schedules that place two of them on each stage in a V.

In a V, stage s of p holds the chunks s and 2 p - 1 - s. ``schedule.lists`` has the other orders.
"""

from __future__ import annotations

from collections import Counter, deque

TRAIN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
"""What ``PipelineModule(schedule=...)`` and ``pipeline.schedule`` accept."""

_VEES = ("zbv", "dualpipev")


def place_chunks(name: str, stages: int, num_chunks: int | None = None) -> tuple[int, ...]:
    """Returns the stage of each chunk of the model, in order, by one of :data:`TRAIN_SCHEDULES`.

    ``num_chunks`` is per stage; None: as few as the schedule can have.

    Raises:
        ValueError: The schedule does not exist or cannot have this many chunks.
    """
    if name not in TRAIN_SCHEDULES:
        raise ValueError(f"schedule={name!r} is not known; choose one of {', '.join(map(repr, TRAIN_SCHEDULES))}")
    if stages < 1:
        raise ValueError(f"a pipeline of {stages} stages is not possible; give it one stage or more")
    if name in _VEES:
        if num_chunks not in (None, 2):
            raise ValueError(
                f"schedule={name!r} lays two chunks per stage in a V, so num_chunks={num_chunks} is not possible; "
                "leave num_chunks out, or choose schedule='interleaved', which takes any number from 2"
            )
        return (*range(stages), *reversed(range(stages)))
    if name == "interleaved":
        if num_chunks is not None and num_chunks < 2:
            raise ValueError(
                f"num_chunks={num_chunks} with schedule='interleaved': expected 2 chunks per stage or more. Raise "
                "num_chunks, or choose schedule='1f1b', which has one"
            )
        return tuple(range(stages)) * (num_chunks or 2)
    if name == "zb-h1" and num_chunks is not None and num_chunks > 1:
        return tuple(range(stages)) * num_chunks
    if num_chunks not in (None, 1):
        raise ValueError(
            f"schedule={name!r} has one chunk per stage and num_chunks is {num_chunks}; leave num_chunks out, or "
            "choose schedule='interleaved'"
        )
    return tuple(range(stages))


class _Stage(list[tuple[str, int, int]]):
    """The computations of one stage: letters (see ``schedule.lists.Kind``), chunks and micro-batches.

    Each call appends the next micro-batch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done: Counter[tuple[bool, int]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self.append(("F", chunk, self._next(True, chunk)))

    def backward(self, chunk: int) -> None:
        self.append(("B", chunk, self._next(False, chunk)))

    def backward_input(self, chunk: int) -> None:
        micro_batch = self._next(False, chunk)
        self.append(("I", chunk, micro_batch))
        self._weights.append((chunk, micro_batch))

    def weight(self) -> None:
        """The weights' part of the longest waiting backward."""
        self.append(("W", *self._weights.popleft()))

    def remaining_weights(self) -> None:
        while self._weights:
            self.weight()

    def _next(self, is_forward: bool, chunk: int) -> int:
        self._done[is_forward, chunk] += 1
        return self._done[is_forward, chunk] - 1


def zbv(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """Returns split backwards on two chunks per stage, placed in a V, so that the first stage also computes the loss.

    Each stage works without a gap from its first forward on if F = B / 2 = W, and holds 2 p chunk activations, as
    much as the first stage of 1F1B (Qi et al. 2024).
    """
    down, up = stage, 2 * stages - 1 - stage
    after, total = stages - stage, max(micro_batches, 2 * stages)
    actions = _Stage()
    for _ in range(2 * after - 1):
        actions.forward(down)
    for _ in range(stage):
        actions.forward(up)
        actions.forward(down)
    for _ in range(after):
        actions.forward(up)
        actions.backward_input(up)
        actions.weight()
    for _ in range(total - stages):
        actions.forward(down)
        actions.backward_input(down)
        actions.weight()
        actions.forward(up)
        actions.backward_input(up)
        actions.weight()
    for _ in range(stage):
        actions.backward_input(down)
        actions.backward_input(up)
    for _ in range(after):
        actions.backward_input(down)
        actions.weight()
    actions.remaining_weights()
    return actions


def dualpipev(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """Returns the V of ZBV with pairs of a forward and a whole backward, which may overlap (DeepSeek-AI 2025).

    Only the backwards at the end are split.
    """
    down, up = stage, 2 * stages - 1 - stage
    after, total = stages - 1 - stage, max(micro_batches, 2 * stages)
    actions = _Stage()
    for _ in range(2 * after):
        actions.forward(down)
    for _ in range(stage + 1):
        actions.forward(down)
        actions.forward(up)
    for _ in range(after):
        actions.backward_input(up)
        actions.weight()
        actions.forward(up)
    for _ in range(total - 2 * stages + stage + 1):
        actions.forward(down)
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    for _ in range(after):
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    # The weights of the last stage + 1 backwards wait for the gaps that follow.
    for number in range(2 * (stage + 1)):
        chunk = down if number % 2 else up
        if number > stage:
            actions.backward_input(chunk)
        else:
            actions.backward(chunk)
    for _ in range(after):
        actions.weight()
        actions.backward_input(down)
    actions.remaining_weights()
    return actions
