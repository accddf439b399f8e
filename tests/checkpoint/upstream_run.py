"""A training script as users of the original package write it; it runs under that package and under this one.

``python upstream_run.py write FOLDER STAGE PRECISION KIND`` trains three steps, saves, and trains two more; rank and
number of ranks come from the environment. ``go_on FOLDER STAGE PRECISION TAG`` continues from a converted checkpoint.
The script imports nothing from the tests, so that an interpreter which has the original package can run it.
"""

import json
import os
import sys

import torch
from torch import nn

VOCABULARY, WIDTH, SAMPLES, LENGTH = 11, 8, 4, 5


class Net(nn.Module):
    """Tied and frozen parameters, two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((WIDTH,), 0.125))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.mean.to(x.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(self.frozen(x))
        self.seen += 1
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def config(stage: int, precision: str, kind: str = "plain") -> dict:
    made: dict = {
        "train_batch_size": SAMPLES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.02, "warmup_min_lr": 0.001},
        },
    }
    if kind == "round-robin":
        made["zero_optimization"]["round_robin_gradients"] = True
    if kind == "elastic":
        made["zero_optimization"]["elastic_checkpoint"] = True
    if kind == "fp32-accumulation":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    return made


def build(stage: int, precision: str, kind: str = "plain", seed: int = 3, **further: dict):
    """An engine of whichever package is installed."""
    import deepspeed

    if precision == "fp16":  # slow on a CPU, but it works; the original package would refuse it
        accelerator = type(deepspeed.get_accelerator())
        accelerator.is_fp16_supported = lambda self: True
    torch.manual_seed(seed)
    model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**config(stage, precision, kind), **further})[
        0
    ]


def train(engine, steps: range, rank: int, ranks: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
        share = SAMPLES // ranks
        mine = slice(rank * share, (rank + 1) * share)
        loss = engine(tokens[mine], targets[mine])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def write(folder: str, stage: int, precision: str, kind: str) -> None:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine = build(stage, precision, kind)
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    train(engine, range(3), rank, ranks)
    engine.save_checkpoint(folder, tag="tag", client_state={"note": "hello", "epoch": 2})
    then = train(engine, range(3, 5), rank, ranks)
    with open(os.path.join(folder, f"losses{rank}.json"), "w") as file:
        json.dump(then, file)
    if rank == 0 and stage > 0 and kind != "fp32-accumulation":
        weights = get_fp32_state_dict_from_zero_checkpoint(folder)
        with open(os.path.join(folder, "weights.json"), "w") as file:
            json.dump({name: tensor.double().flatten().tolist() for name, tensor in weights.items()}, file)


def go_on(folder: str, stage: int, precision: str, tag: str) -> None:
    """Loads a universal checkpoint into a model that has its frozen parameters and buffers, and trains two steps."""
    import deepspeed

    engine = build(stage, precision, checkpoint={"load_universal": True})
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    held = {"path": path, "note": client_state["note"], "steps": engine.global_steps, "samples": engine.global_samples}
    losses = train(engine, range(3, 5), rank, ranks)
    scale = getattr(engine.optimizer, "cur_scale", None) or getattr(engine.optimizer, "loss_scale", 1.0)
    with open(os.path.join(folder, f"went_on{rank}.json"), "w") as file:
        json.dump({**held, "losses": losses, "scale": float(scale)}, file)


if __name__ == "__main__":
    command = {"write": write, "go_on": go_on}[sys.argv[1]]
    command(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
