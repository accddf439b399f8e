"""The one way tests run several ranks.

from tests.harness import run_ranks

def body(size):                      # module-level: the workers import it by name
    x = torch.full((size,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x

def test_sum():
    assert run_ranks(body, 2, 3)[0].tolist() == [1.0, 1.0, 1.0]
"""

from tests.harness.compare import assert_states_equal, on_first_rank
from tests.harness.errors import RankDied, RankReport, RanksFailed, RanksTimedOut
from tests.harness.pool import run_ranks, shut_down

__all__ = [
    "RankDied",
    "RankReport",
    "RanksFailed",
    "RanksTimedOut",
    "assert_states_equal",
    "on_first_rank",
    "run_ranks",
    "shut_down",
]
