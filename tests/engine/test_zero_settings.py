"""From the configuration's words to the settings of the runtime."""

import pytest

from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.root import Root
from deepspeed.engine.zero_settings import gradient_divisor


@pytest.mark.parametrize(
    ("data", "sequence", "others", "loss", "divisor"),
    [
        (4, 1, 1, "gathered", 4),
        (2, 3, 1, "gathered", 6),
        (2, 3, 1, "own_share", 2),
        (2, 1, 3, "gathered", 6),  # along an axis whose ranks see the same samples and hold the same part
        (2, 3, 5, "own_share", 10),
    ],
)
def test_a_sum_over_ranks_becomes_a_mean(data: int, sequence: int, others: int, loss: str, divisor: int) -> None:
    zero = data * sequence * others
    ranks = RankCoordinates(None, None, zero, 0, data, 0, sequence_size=sequence)
    root = Root.model_validate({"sequence_parallel": {"loss": loss}})
    assert gradient_divisor(root, ranks) == divisor
