"""Ranks that share a sequence send their tokens to different experts, so each has parameters that it does not use."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.moe.layer import MoE
from deepspeed.sequence.layer import DistributedAttention
from tests.engine.support import engine_of
from tests.harness import on_ranks
from tests.parallel.sequence.net import attend

WIDTH, HEADS, EXPERTS = 8, 2, 4


class Net(nn.Module):
    """Attention in front of experts, which rank r sends all its tokens to expert r of."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.recomputed = recomputed
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(attend, None)
        expert = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.moe = MoE(WIDTH, expert, EXPERTS, k=1, drop_tokens=False)
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(10 * torch.eye(EXPERTS, WIDTH))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, WIDTH // HEADS).chunk(3, dim=2)
        seen: torch.Tensor = self.attention(q, k, v, 0).flatten(2)
        return x + 0.1 * seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._attend, x, use_reentrant=False) if self.recomputed else self._attend(x)
        return self.moe(x)[0].square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@on_ranks(2)
def test_backward_does_not_wait_for_reductions_that_a_peer_holds_back(recomputed: bool) -> None:
    """A rank that waited for its peer's idle expert would leave it waiting in the exchange of attention for ever."""
    zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 20}
    engine = engine_of(Net(recomputed), 3, zero=zero, sequence_parallel_size=2)
    chosen = torch.eye(WIDTH)[dist.get_rank()] * 5
    for step in range(3):
        x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(step)) * 0.1 + chosen
        engine.backward(engine(x.requires_grad_()))
        engine.step()
