"""A pipeline as users of the original package write it; it runs under that package and under this one.

``python upstream_pipeline_run.py FOLDER STAGE PRECISION STAGES`` trains three steps, saves, and trains two more; rank
and number of ranks come from the environment. It imports nothing from the tests, so that an interpreter which has the
original package can run it.
"""

import json
import os
import sys

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, COUNT = 11, 8, 5, 2


class Embed(nn.Module):
    """Tied with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def head(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.weight.T


class Block(nn.Module):
    """With a frozen parameter and a buffer."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.25), requires_grad=False)
        self.register_buffer("mean", torch.full((WIDTH,), 0.125))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + made + self.frozen + self.mean.to(hidden.dtype)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build(stage: int, precision: str, stages: int, seed: int = 3, **further: object):
    """An engine of whichever package is installed."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo")
    torch.manual_seed(seed)
    layers = [
        TiedLayerSpec("embed", Embed),
        *[LayerSpec(Block, inner) for inner in (6, 10, 8)],
        torch.tanh,
        TiedLayerSpec("embed", Embed, forward_fn=head),
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.02, "warmup_min_lr": 0.001},
        },
        **further,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, steps: range, copies: int) -> list[float]:
    """Every copy of the model takes its share of the same samples."""
    losses = []
    place = engine.grid.get_data_parallel_rank() if copies > 1 else 0
    for step in steps:
        made = torch.Generator().manual_seed(step)
        items = [tuple(torch.randint(VOCABULARY, (2, LENGTH), generator=made) for _ in range(2)) for _ in range(4)]
        per = len(items) // copies
        mine = items[place * per : (place + 1) * per]
        engine.set_train_batch_size(2 * len(items))
        losses.append(float(engine.train_batch(iter(mine))))
    return losses


def write(folder: str, stage: int, precision: str, stages: int) -> None:
    engine = build(stage, precision, stages)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    copies = ranks // stages
    train(engine, range(3), copies)
    engine.save_checkpoint(folder, tag="tag", client_state={"note": "hello", "epoch": 2})
    then = train(engine, range(3, 5), copies)
    with open(os.path.join(folder, f"losses{rank}.json"), "w") as file:
        json.dump(then, file)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
