"""Batch arithmetic: total = micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.errors import DeepSpeedConfigError

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The three sizes, in samples and micro-batches."""

    train_batch_size: int  # samples per optimizer step over all data-parallel ranks
    micro_batch_size: int  # samples of one forward pass on one rank
    accumulation_steps: int  # micro-batches per optimizer step
    is_uneven: bool = False  # ranks may have different numbers of micro-batches; ``accumulation_steps`` is the largest

    @property
    def data_ranks(self) -> int:
        """The ranks that share a batch."""
        return self.train_batch_size // self.micro_batch_size // self.accumulation_steps


def _fitting(total: int, multiple: int) -> str:
    below = total // multiple * multiple
    above = below + multiple
    return f"{below} or {above}" if below else f"{above}"


def batch_mismatch(total: int | None, micro: int | None, accumulation: int | None, ranks: int | None) -> str | None:
    """Returns what is wrong with the three sizes, with all numbers; None if they agree.

    With ``ranks`` None only what holds for every number of ranks is checked.
    """
    if total is None and micro is None:
        given = f"; {ACCUMULATION} alone does not determine how many samples a step has" if accumulation else ""
        return f"expected {TOTAL} or {MICRO}, found neither{given}; set one of them"
    if total is None:
        return None
    known = ranks if ranks is not None else 1
    size = f" x data-parallel size {ranks}" if ranks is not None else ""
    if micro is not None and accumulation is not None:
        product = micro * accumulation * known
        wrong = total != product if ranks is not None else total % product
        if wrong:
            relation = "is" if ranks is not None else "does not divide it: it is"
            fit = f"{product}" if ranks is not None else _fitting(total, product)
            return (
                f"{total} does not fit: {MICRO} {micro} x {ACCUMULATION} {accumulation}{size} {relation} {product}; "
                f"set {TOTAL} to {fit}, or leave one of the three out to have it derived"
            )
        return None
    if micro is not None and total % (micro * known):
        unit = micro * known
        return (
            f"{total} does not fit: it is not a multiple of {MICRO} {micro}{size} = {unit}, so no whole {ACCUMULATION} "
            f"exists; {_fitting(total, unit)} would fit"
        )
    if micro is None:
        steps = accumulation or 1
        unit = steps * known
        if total % unit:
            named = f"{ACCUMULATION} {steps}" if accumulation else f"{ACCUMULATION} 1 (not given)"
            return (
                f"{total} does not fit: it is not a multiple of {named}{size} = {unit}, so no whole {MICRO} exists; "
                f"{_fitting(total, unit)} would fit"
            )
    return None


def uneven_mismatch(total: int | None, micro: int | None, accumulation: int | None) -> str | None:
    """Returns what is wrong with the sizes if the number of ranks may change (``elasticity.continue``), or None."""
    if total is None or micro is None:
        missing = " and ".join(name for name, value in ((TOTAL, total), (MICRO, micro)) if value is None)
        return f"elasticity.continue needs {TOTAL} and {MICRO}, as both stay when ranks come and go; set {missing}"
    if accumulation is not None:
        return (
            f"{ACCUMULATION} {accumulation} is set, but with elasticity.continue it follows from the number of ranks; "
            "leave it out"
        )
    if total % micro:
        return f"{total} is not a multiple of {MICRO} {micro}; {_fitting(total, micro)} would fit"
    return None


def resolve_uneven(total: int, micro: int, ranks: int) -> BatchSizes:
    """Returns the sizes where the micro-batches of an update need not be a multiple of the number of ranks."""
    return BatchSizes(total, micro, -(-total // micro // ranks), is_uneven=True)


def resolve_batch(
    train_batch_size: int | None, micro_batch_size: int | None, accumulation_steps: int | None, dp_world_size: int
) -> BatchSizes:
    """Derives missing sizes. Raises DeepSpeedConfigError: they contradict each other, or do not suffice."""
    wrong = batch_mismatch(train_batch_size, micro_batch_size, accumulation_steps, dp_world_size)
    if wrong is not None:
        raise DeepSpeedConfigError(f"{TOTAL}: {wrong}")
    if train_batch_size is None:
        assert micro_batch_size is not None
        steps = accumulation_steps or 1
        return BatchSizes(micro_batch_size * steps * dp_world_size, micro_batch_size, steps)
    if micro_batch_size is None:
        steps = accumulation_steps or 1
        return BatchSizes(train_batch_size, train_batch_size // dp_world_size // steps, steps)
    return BatchSizes(train_batch_size, micro_batch_size, train_batch_size // micro_batch_size // dp_world_size)
