"""A small model with what makes checkpoints go wrong, and training runs whose whole state can be compared."""

from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm
from tests.harness.toy_models import Layer

VOCABULARY, WIDTH, SAMPLES, LENGTH = 11, 9, 12, 4
PRECISIONS = ("fp32", "bf16", "fp16")


class Net(nn.Module):
    """Tied, frozen, scalar, empty, never used and late used parameters; buffers of three kinds; dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.blocks = nn.ModuleList(Layer(WIDTH, 23, has_norm=True) for _ in range(3))
        self.frozen = Layer(WIDTH, 23, has_norm=True)
        self.frozen.requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((WIDTH,), 0.125))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, late: bool) -> torch.Tensor:
        x = self.embed(tokens)
        x = x * self.gain + self.mean.to(x.dtype) + self.empty.sum()
        for block in self.blocks:
            x = self.dropout(block(x))
        x = self.frozen(x)
        if late:
            x = self.late(x)
        if self.training:
            self.seen += 1
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two interleaved groups, as training scripts make them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def config(stage: int, precision: str = "bf16", **further: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "stage3_prefetch_bucket_size": 100,
        },
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.02}},
    }
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    elif precision == "bf16":
        made["bf16"] = {"enabled": True}
    for key, value in further.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict) and key != "optimizer":
            made[key] = {**made[key], **value}
        elif value is None:
            made.pop(key, None)
        else:
            made[key] = value
    return made


def offload(stage: int, states: str, parameters: str, files: str) -> dict[str, Any]:
    """Sections for the tiers of the optimizer's states and of the parameters; none at stages that have no such tier."""
    made: dict[str, Any] = {}
    if states != "none" and stage > 0:
        made["offload_optimizer"] = {"device": states, "nvme_path": files}
    if parameters != "none" and stage == 3:
        made["offload_param"] = {"device": parameters, "nvme_path": files, "buffer_size": 10_000, "max_in_cpu": 0}
    return made


def engine(stage: int, precision: str = "bf16", *, seed: int = 3, dropout: float = 0.0, **further: Any) -> Any:
    """An engine over a fresh model; another seed gives other values everywhere."""
    torch.manual_seed(seed)
    model = Net(dropout)
    if seed != 3:
        model.mean.add_(seed)
    made = config(stage, precision, **further)
    parameters = groups(model) if "optimizer" in made else None
    return deepspeed.initialize(model=model, config=made, model_parameters=parameters)[0]


def train(run: Any, steps: range, late_from: int = 2) -> list[float]:
    """Trains on the same global batches whatever the number of ranks; returns this rank's losses."""
    ranks, rank = comm.get_world_size(), comm.get_rank()
    losses = []
    run.train()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        targets = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        share = SAMPLES // ranks
        mine = slice(rank * share, (rank + 1) * share)
        loss = run(tokens[mine], targets[mine], step >= late_from)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


Fragments = dict[tuple[str, str], list[tuple[int, torch.Tensor]]]


def fragments(run: Any) -> Fragments:
    """What this rank holds: ``(kind, parameter)`` to fragments of the flattened parameter."""
    found: Fragments = {}
    masters = {master.bucket.index: master for master in run._runtime.masters}

    def note(kind: str, layout: Any, rank: int, values: torch.Tensor) -> None:
        for fragment in layout.fragments(rank):
            part = values[fragment.slice_start : fragment.slice_start + fragment.numel]
            found.setdefault((kind, layout.tiles[fragment.tile].name), []).append((fragment.tile_start, part.clone()))

    for bucket in run._runtime.buckets:
        rank = bucket.transport.rank
        mine = bucket.shard if bucket.is_sharded else bucket.transport.my_slice(bucket.full.tensor)
        note("compute", bucket.layout, rank, mine)
        master = masters.get(bucket.index)
        if master is None:
            continue
        note("master", master.layout, master.rank, master.flat)
        base = master.layout.slice_bounds(master.rank)[0]
        for fragment in master.fragments:
            tile = master.layout.tiles[fragment.tile]
            for one in master.runs:
                if not one.interval.start <= fragment.slice_start < one.interval.stop:
                    continue
                for key, value in run.basic_optimizer.state.get(one.param, {}).items():
                    at = found.setdefault((f"state.{key}", tile.name), [])
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        start = fragment.slice_start - one.interval.start
                        at.append((fragment.tile_start, value.view(-1)[start : start + fragment.numel].clone()))
                    else:
                        at.append((-1, torch.as_tensor(value).clone()))
        del base
    return found


def joined(parts: list[Fragments]) -> dict[str, torch.Tensor]:
    """Whole flattened parameters, moments and scalars by ``kind/name`` from the fragments of all ranks."""
    fragments: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for rank in parts:
        for key, entries in rank.items():
            for start, values in entries:
                have = fragments.setdefault(key, {}).get(start)
                assert have is None or torch.equal(have, values), f"{key}: ranks differ"
                fragments[key][start] = values
    return {
        f"{kind}/{name}": entries[-1] if -1 in entries else torch.cat([entries[start] for start in sorted(entries)])
        for (kind, name), entries in fragments.items()
    }


def other_state(run: Any) -> dict[str, Any]:
    """Everything of a run that is the same on all ranks and is no parameter."""
    return {
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in run.basic_optimizer.param_groups
        ],
        "scheduler": run.lr_scheduler.state_dict(),
        "scaler": run.optimizer.loss_scaler.state_dict() if run.optimizer.loss_scaler else None,
        "counters": [run.global_steps, run.global_samples, run.skipped_steps, run.micro_steps],
        "seen": run.module.seen.clone(),
        "mean": run.module.mean.clone(),
    }
