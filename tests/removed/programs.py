"""The last published configurations of the sections that release 0.19.8 of the original removed, and small programs.

Programs use only names that both packages have, so that the same file ran in release 0.19.6, where :data:`RECORDED`
comes from.
"""

from __future__ import annotations

import copy
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
PUBLISHED: dict[str, dict[str, Any]] = {
    "elasticity": {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 2000,
            "micro_batch_sizes": [2, 4, 6],
            "min_gpus": 1,
            "max_gpus": 10000,
            "min_time": 20,
            "ignore_non_elastic_batch_info": False,
            "version": 0.1,
        },
    },
    "1-bit Adam": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False, "comm_backend_name": "nccl"},
        },
        "fp16": {"enabled": True},
    },
    "1-bit LAMB": {
        "train_batch_size": 65536,
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {
            "type": "OneBitLamb",
            "params": {
                "lr": 11e-3,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
                "freeze_step": 1000,
                "cuda_aware": False,
                "comm_backend_name": "nccl",
                "coeff_beta": 0.9,
                "factor_max": 4.0,
                "factor_min": 0.5,
                "factor_threshold": 0.1,
            },
        },
        "gradient_clipping": 1.0,
        **HALF,
    },
    "0/1 Adam": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {
            "type": "ZeroOneAdam",
            "params": {
                "lr": 1e-3,
                "weight_decay": 0.01,
                "bias_correction": False,
                "var_freeze_step": 1000,
                "var_update_scaler": 16,
                "local_step_scaler": 1000,
                "local_step_clipper": 16,
                "cuda_aware": False,
                "comm_backend_name": "nccl",
            },
        },
        "gradient_clipping": 1.0,
        **HALF,
    },
    "MiCS": {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": False},
    },
    "LoCo": {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_gradients": True,
            "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
        },
    },
    "compression_training": {
        "train_micro_batch_size_per_gpu": 2,
        "compression_training": {
            "layer_reduction": {
                "enabled": True,
                "keep_number_layer": 5,
                "module_name_prefix": "bert.encoder.layer",
                "teacher_layer": [2, 4, 6, 8, 10],
                "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
            },
            "weight_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "quantizer_kernel": False,
                    "schedule_offset": 0,
                    "quantize_groups": 1,
                    "quantize_verbose": False,
                    "quantization_type": "symmetric",
                    "rounding": "nearest",
                    "quantize_weight_in_forward": False,
                    "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
                },
                "different_groups": {
                    "wq1": {
                        "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50},
                        "modules": ["attention.self", "intermediate"],
                    },
                    "wq2": {
                        "params": {"start_bits": 4, "target_bits": 4, "quantization_period": 50},
                        "modules": ["attention.output"],
                    },
                },
            },
            "activation_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "quantization_type": "asymmetric",
                    "range_calibration": "dynamic",
                    "schedule_offset": 50,
                },
                "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.output"]}},
            },
            "sparse_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 30, "method": "l1"},
                "different_groups": {"sp1": {"params": {"dense_ratio": 0.5}, "modules": ["attention.self"]}},
            },
            "row_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 20, "method": "topk"},
                "different_groups": {
                    "rp1": {
                        "params": {"dense_ratio": 0.5},
                        "modules": ["intermediate.dense"],
                        "related_modules": [["layer.\\w+.output.dense"]],
                    }
                },
            },
            "head_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 10, "method": "topk", "num_heads": 12},
                "different_groups": {
                    "rp1": {
                        "params": {"dense_ratio": 0.5},
                        "modules": ["attention.output.dense"],
                        "related_modules": [["self.query", "self.key", "self.value"]],
                    }
                },
            },
        },
    },
    "quantize_training": {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0, "bias_correction": True}},
        "gradient_clipping": 1.0,
        "fp16": {"initial_scale_power": 16, "enabled": True},
        "quantize_training": {
            "enabled": True,
            "quantize_verbose": True,
            "quantizer_kernel": True,
            "quantize_algo": {"q_type": "symmetric"},  # the tutorial writes quantize-algo, which nothing read
            "quantize_bits": {"start_bits": 16, "target_bits": 8},
            "quantize_schedule": {"quantize_period": 400, "schedule_offset": 0},
            "quantize_groups": 8,
        },
    },
    "eigenvalue": {
        "train_micro_batch_size_per_gpu": 2,
        "eigenvalue": {
            "enabled": True,
            "verbose": True,
            "max_iter": 50,
            "tol": 1e-2,
            "stability": 0,
            "gas_boundary_resolution": 1,
            "layer_name": "bert.encoder.layer",
            "layer_num": 12,
        },
    },
    "sparse_attention": {
        "train_micro_batch_size_per_gpu": 2,
        "sparse_attention": {
            "mode": "fixed",
            "block": 16,
            "different_layout_per_head": True,
            "num_local_blocks": 4,
            "num_global_blocks": 1,
            "attention": "bidirectional",
            "horizontal_global_attention": False,
            "num_different_global_patterns": 4,
        },
    },
    "sparse_gradients": {"train_micro_batch_size_per_gpu": 2, "sparse_gradients": True},
    "progressive_layer_drop": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 1000,
        "prescale_gradients": True,
        "gradient_predivide_factor": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": False}},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    },
    "curriculum_learning": {
        "train_batch_size": 4096,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}},
        "gradient_clipping": 1.0,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8},
        },
    },
}

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
