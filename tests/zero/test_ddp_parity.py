"""Step by step against torch's own DistributedDataParallel and AdamW, on the same ranks.

fp32. Every step starts from equal weights on both sides (the engine's are loaded into DDP's model where they differ in
the last bit), so that what is measured is the error of one step and not its growth: relative to the norm of the weights
at most 1e-6, and the step itself to 1e-4 of its length. Without that, over six steps, the weights stay within 1e-5.

bf16. DDP has no master weights, so its counterpart is a bf16 model under DDP (bf16 gradients, averaged in bf16) whose
gradients go to fp32 masters by hand. Two roundings of the average to bf16 lie between the two sides: the step agrees to
2 % of its length.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepspeed.engine import initialize
from tests.engine.matrix.cells import LIMITS
from tests.engine.matrix.run import distance
from tests.harness import run_ranks
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups
from tests.zero.reading import full_masters

CLIP = 0.3
OUTPUTS = ["dataclass", "dict", "tuple"]


class Ddp:
    """The other side: DDP where there are ranks, the plain model where there is one; fp32 masters under bf16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.masters = awkward()
        self.model = awkward().to(dtype)
        wrap = dist.get_world_size() > 1
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True) if wrap else self.model
        self.optimizer = torch.optim.AdamW(param_groups(self.masters), lr=0.01, eps=1e-6)
        self.norm = 0.0

    def step(self, batches):
        self.model.zero_grad(set_to_none=True)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self.ddp.require_backward_grad_sync = last
            (losses_of(self.ddp(batch)).loss / len(batches)).backward()
        used = self._used_anywhere()
        for (name, master), p in zip(self.masters.named_parameters(), self.model.parameters(), strict=True):
            master.grad = p.grad.float() if p.grad is not None and name in used else None
        self.norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), CLIP).item()
        self.optimizer.step()
        self.publish()

    def _used_anywhere(self):
        return {name for name, p in self.model.named_parameters() if p.grad is not None}

    @torch.no_grad()
    def publish(self):
        for p, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
            p.copy_(master)

    def weights(self):
        return {name: p.detach().clone() for name, p in self.masters.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load(self, weights):
        for name, value in weights.items():
            self.masters.get_parameter(name).copy_(value)
        self.publish()


def _compare(stage, limits, accumulation, dtype, resynchronize, steps, tolerances):
    weight_tolerance, step_tolerance = tolerances
    other = Ddp(dtype)
    model = awkward(OUTPUTS[(stage + accumulation) % 3])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **LIMITS[limits]},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.01, eps=1e-6)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    for step in range(steps):
        before = other.weights()
        batches = [make_batch(step, m, dist.get_rank(), branch=step != 2) for m in range(accumulation)]
        other.step(batches)
        for batch in batches:
            engine.backward(losses_of(engine(batch)).loss)
            engine.step()
        mine, theirs = full_masters(engine), other.weights()
        where = f"stage {stage}, {limits}, accumulation {accumulation}, step {step}"
        gap = distance(mine, theirs, theirs)
        assert gap <= weight_tolerance, f"{where}: weights off by {gap:.2g}"
        way = {name: theirs[name] - before[name] for name in theirs}
        gap = distance(mine, theirs, way)
        assert gap <= step_tolerance, f"{where}: the step is off by {gap:.2g} of its length"
        assert engine.get_global_grad_norm() == pytest.approx(other.norm, rel=max(1e-6, step_tolerance / 4)), where
        if resynchronize:
            other.load(mine)


CELLS = [
    (stage, limits, accumulation) for stage in range(4) for limits in ("default", "small") for accumulation in (1, 2)
]
# Every stage with both limits, both accumulations, and every pair of those at half of the stages.
HALF = [cell for cell in CELLS if (cell[0] + (cell[1] == "small") + cell[2]) % 2]


def _every(cells, *how):
    for cell in cells:
        _compare(*cell, *how)


def _with(limits, cells=CELLS):
    return [cell for cell in cells if cell[1] == limits]


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_fp32_step_by_step(ranks):
    """The third step leaves the branch out, the fourth takes it again."""
    cells = CELLS if ranks == 2 else HALF
    run_ranks(_every, ranks, cells, torch.float32, True, 4, (1e-6, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_cell_in_fp32(ranks):
    run_ranks(_every, ranks, CELLS, torch.float32, True, 6, (1e-6, 1e-4))


def test_fp32_over_six_steps():
    run_ranks(_every, 2, _with("small"), torch.float32, False, 6, (1e-5, 1e-2))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))])
def test_bf16_step_by_step(ranks):
    cells = _with("small") if ranks == 2 else _with("small", HALF)
    run_ranks(_every, ranks, cells, torch.bfloat16, True, 4, (1e-3, 2e-2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_cell_in_bf16(ranks):
    run_ranks(_every, ranks, _with("small"), torch.bfloat16, True, 6, (1e-3, 2e-2))
