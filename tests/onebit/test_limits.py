"""Models that are awkward for messages of whole buckets: tied, frozen, of odd sizes, used on one rank alone."""

import torch
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import inputs, rank, same_on_all_ranks
from tests.harness import on_ranks
from tests.onebit.test_adam import engine_with

WAYS = [
    *((name, stage, {"freeze_step": 2}) for name in ("OneBitAdam", "OneBitLamb") for stage in (0, 1, 2)),
    ("OneBitAdam", 0, {"freeze_step": 2, "precondition": False}),
    ("ZeroOneAdam", 0, {"var_freeze_step": 3}),
    ("ZeroOneAdam", 0, {"var_freeze_step": 3, "precondition": False}),
]


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(7, 9)
        self.head = nn.Linear(9, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen, self.seldom = nn.Linear(9, 9), nn.Linear(9, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, seldom: float | None) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embedding((x[0] * 100).long() % 5)))
        loss = self.head(hidden).square().mean() + hidden.mean()
        return loss if seldom is None else loss + seldom * self.seldom(hidden).square().mean()


def train(engine: DeepSpeedEngine, *, dense: bool) -> dict[str, torch.Tensor]:
    for step in range(6):
        absent = 0.0 if dense else None
        engine.backward(engine(inputs(step, rank()), 1.0 if rank() == 1 else absent))
        engine.step()
        assert all(value.abs().max() < 10 for _, value in engine.iter_full("fp32"))
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


@on_ranks(2, 3)
def test_what_one_rank_does_not_use_counts_as_zeros() -> None:
    for name, stage, more in WAYS:
        found = []
        section = {"optimizer": {"type": name, "params": {"lr": 0.01, "eps": 1e-3, **more}}}
        for dense in (False, True):
            engine = engine_with(Awkward(), stage, None, section, gradient_clipping=0.1)
            before = {key: value.clone() for key, value in engine.iter_full("fp32")}
            after = train(engine, dense=dense)
            assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")]), (name, stage)
            for key, value in after.items():
                moved = not torch.equal(value, before[key])
                assert moved is not key.startswith("frozen"), (name, stage, key)
            found.append(after)
            engine.destroy()
        assert all(torch.equal(value, found[1][key]) for key, value in found[0].items()), (name, stage)
