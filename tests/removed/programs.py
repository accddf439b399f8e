"""The last published configurations of the sections that release 0.19.8 of the original removed, and small programs.

Programs use only names that both packages have, so that the same file ran in release 0.19.6, where :data:`RECORDED`
comes from.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import deepspeed

VOCABULARY, WIDTH, HEADS, LENGTH, SAMPLES = 32, 16, 4, 24, 2
HALF = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}

# As published: in the tutorials, where there is one, otherwise in the page of configuration keys. A batch is added to
# those that show a section only.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())

# What the programs change: sizes of batches and models, and schedules that take thousands of steps. Precision is fp32,
# since 0.19.6 has no fp16 on CPUs, and its own Adam is compiled at first use, hence torch_adam.
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}}
BATCH = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": False}}
WEIGHTS = "compression_training.weight_quantization.shared_parameters"
CHANGES: dict[str, dict[str, Any]] = {
    "elasticity": {**ADAM, "elasticity.max_train_batch_size": 24},
    "1-bit Adam": {**BATCH, "optimizer.params.freeze_step": 2},
    "1-bit LAMB": {**BATCH, "optimizer.params.freeze_step": 3},
    "0/1 Adam": {
        **BATCH,
        "optimizer.params.var_freeze_step": 4,
        "optimizer.params.var_update_scaler": 1,
        "optimizer.params.local_step_scaler": 2,
        "optimizer.params.local_step_clipper": 3,
    },
    "MiCS": {**ADAM, "zero_optimization.mics_shard_size": 2},
    "LoCo": {"zero_optimization.zeropp_loco_param.reset_T": 3},
    "compression_training": {
        **ADAM,
        "compression_training.layer_reduction.keep_number_layer": 2,
        "compression_training.layer_reduction.module_name_prefix": "encoder.layer",
        "compression_training.layer_reduction.teacher_layer": [1, 3],
        "compression_training.layer_reduction.other_module_name": ["embeddings", "classifier"],
        "compression_training.head_pruning": None,  # topk draws scores at random
        "compression_training.sparse_pruning": None,  # 0.19.6 raises a KeyError at the first step
        "compression_training.row_pruning.shared_parameters.method": "l1",
        f"{WEIGHTS}.quantize_weight_in_forward": True,  # as the tutorial requires in fp32
        "compression_training.activation_quantization.shared_parameters.schedule_offset": 1,
        "compression_training.row_pruning.shared_parameters.schedule_offset": 2,
    },
    "quantize_training": {
        "fp16.enabled": False,
        "optimizer.params.lr": 1e-2,
        "optimizer.params.bias_correction": None,
        "optimizer.params.torch_adam": True,
        "quantize_training.quantize_bits": {"start_bits": 8, "target_bits": 4},
        "quantize_training.quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    },
    "eigenvalue": {
        "eigenvalue.layer_name": "layers",
        "eigenvalue.layer_num": 2,
        "eigenvalue.gas_boundary_resolution": 2,
    },
    "sparse_attention": {},
    "sparse_gradients": ADAM,
    "progressive_layer_drop": {
        **BATCH,
        "optimizer.params.bias_correction": None,
        "optimizer.params.torch_adam": True,
        "progressive_layer_drop.gamma": 0.5,
    },
    "curriculum_learning": {
        **BATCH,
        "optimizer.params.max_grad_norm": None,  # refused by 0.19.6 outside of fp16
        "optimizer.params.torch_adam": True,
        "curriculum_learning.max_difficulty": LENGTH,
        "curriculum_learning.schedule_config.total_curriculum_step": 4,
    },
}


def shortened(name: str) -> dict[str, Any]:
    """Returns the published configuration with its changes; a change to None removes the key."""
    config = copy.deepcopy(PUBLISHED[name])
    for path, value in CHANGES[name].items():
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place[section]
        if value is None:
            del place[key]
        else:
            place[key] = copy.deepcopy(value)
    return config


class Block(nn.Module):
    """A layer of a BERT, with the names of its modules."""

    def __init__(self) -> None:
        super().__init__()
        heads = {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}
        output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(heads), "output": output})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Any = self.attention["self"]
        q, k, v = (parts[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        scores = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        output: Any = self.attention["output"]
        x = x + output["dense"]((scores @ v).transpose(1, 2).flatten(2))
        return x + self.output["dense"](torch.relu(self.intermediate["dense"](x)))


class Encoder(nn.Module):
    """A small encoder that takes the arguments of layer dropping and of the older curriculum; returns the loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Block() for _ in range(layers))})
        self.classifier = nn.Linear(WIDTH, VOCABULARY)
        self.forwards = 0

    def forward(
        self,
        tokens: torch.Tensor,
        curriculum_seqlen: int | None = None,
        progressive_layer_drop: bool = False,
        pld_theta: float = 1.0,
    ) -> torch.Tensor:
        self.forwards += 1
        draws = torch.rand(len(self.encoder["layer"]), generator=torch.Generator().manual_seed(self.forwards))
        tokens = tokens[:, :curriculum_seqlen]
        x = self.embeddings(tokens)
        for number, layer in enumerate(self.encoder["layer"], 1):
            if draws[number - 1] < 1 - number / len(draws) * (1 - pld_theta):
                x = layer(x)
        return F.cross_entropy(self.classifier(x).flatten(0, 1), (3 * tokens + 1).flatten() % VOCABULARY)


def encoder(layers: int = 2, seed: int = 3) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(layers)


def prepared(name: str, config: dict[str, Any]) -> nn.Module:
    """Returns the model as the program of a section makes it before ``initialize``."""
    if name == "MiCS":
        with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
            return encoder()
    if name == "compression_training":
        from deepspeed.compression.compress import init_compression

        return init_compression(encoder(), config, teacher_model=encoder(4, seed=4))
    return encoder()


def tokens_of(*position: int) -> torch.Tensor:
    seed = 7
    for number in position:
        seed = seed * 1009 + number
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))


# Mean losses of both ranks in release 0.19.6 (as published, torch 2.13.0 on CPUs, gloo): two processes ran this file
# outside of the repository, with DS_ACCELERATOR=cpu and without its shared-memory operator, which needs a compiler.
RECORDED = {
    "elasticity": [
        3.650587558746338,
        3.310075521469116,
        2.9800045490264893,
        2.706885814666748,
        2.3615314960479736,
        2.044267177581787,
    ],
    "compression_training": [
        3.6179020404815674,
        3.273026466369629,
        3.217942476272583,
        3.0363845825195312,
        2.783229351043701,
        2.5963454246520996,
    ],
    "sparse_gradients": [
        3.681673049926758,
        3.3082501888275146,
        3.1027793884277344,
        2.7302541732788086,
        2.460343837738037,
        2.236790895462036,
    ],
    "curriculum_learning": [
        3.7708547115325928,
        3.6279335021972656,
        3.6872897148132324,
        3.6185684204101562,
        3.692758560180664,
        3.6939187049865723,
    ],
}


def mean_of(losses: list[torch.Tensor]) -> float:
    """Returns the mean over all ranks, which must all call."""
    total = torch.stack(losses).detach().mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def losses_of(name: str, steps: int = 6) -> list[float]:
    """Trains; returns the mean loss of all ranks and micro-batches by step. All ranks must call."""
    config = shortened(name)
    model = prepared(name, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = []
    for step in range(steps):
        losses = []
        for micro in range(engine.gradient_accumulation_steps()):
            losses.append(engine(tokens_of(step, micro, dist.get_rank())))
            engine.backward(losses[-1])
            engine.step()
        found.append(mean_of(losses))
    return found
