"""The one way tests run several ranks.

from tests.harness import on_ranks, run_ranks

@on_ranks(2)                         # every rank runs the test
def test_sum(rank):
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0, 1.0]

def body(size):                      # module-level: the workers import it by name
    return torch.full((size,), float(dist.get_rank()))

def test_results():                  # the test compares what the ranks return
    assert run_ranks(body, 2, 3)[1].tolist() == [1.0, 1.0, 1.0]
"""

from tests.harness.compare import assert_states_equal, on_first_rank
from tests.harness.errors import RankDied, RankReport, RanksFailed, RanksTimedOut
from tests.harness.on_ranks import on_ranks, on_threads
from tests.harness.pool import run_ranks, shut_down

__all__ = [
    "RankDied",
    "RankReport",
    "RanksFailed",
    "RanksTimedOut",
    "assert_states_equal",
    "on_first_rank",
    "on_ranks",
    "on_threads",
    "run_ranks",
    "shut_down",
]
