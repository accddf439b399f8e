"""Small models for tensor parallelism, and a plain torch run of one rank to compare with."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.harness import on_first_rank
from tests.harness.toy_models import causal_model

VOCABULARY = 67


def llama(**changes: Any) -> nn.Module:
    """A Llama with sizes that no number of ranks divides, and biases."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "attn_implementation": "eager",
    }
    return causal_model(**{**sizes, **changes})


def ids(step: int, data: int, length: int = 9) -> torch.Tensor:
    """A micro-batch of a data-parallel rank: 2 rows."""
    generator = torch.Generator().manual_seed(100 * step + data)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


def adamw(parameters: Any, lr: float = 1e-2) -> torch.optim.AdamW:
    """Its eps is large beside rounding: the update of a gradient that is nearly zero would be that of its rounding."""
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-3, weight_decay=0.1)


def assert_weights_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of the largest element of each."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        atol = 1e-5 * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol, msg=lambda t, n=name: f"{n}: {t}")


def loss_of(model: Any, step: int, data: int) -> torch.Tensor:
    batch = ids(step, data)
    return model(input_ids=batch, labels=batch).loss


@dataclass
class Expected:
    """What one rank computes with a whole model.

    Attributes:
        losses: Mean over the data-parallel ranks, by step.
        norms: Of the gradients, before clipping.
        state: The model afterwards.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


@on_first_rank
def plain_run(
    model: nn.Module,
    steps: int,
    data: int,
    accumulation: int = 1,
    clip: float = 0.5,
    loss: Any = loss_of,
    optimizer: Any = adamw,
) -> Expected:
    """Trains a copy of ``model`` with plain torch, on rank 0 for all."""
    loss_of = loss
    model = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer(trained)
    found = Expected([], [], {})
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(data):
                loss = loss_of(model, 10 * step + micro, rank) / data / accumulation
                loss.backward()
                total += loss.item()
        found.norms.append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        optimizer.step()
        found.losses.append(total)
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def config(size: int, stage: int, **sections: Any) -> dict[str, Any]:
    """A configuration of a model that is cut over ``size`` ranks."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "tensor_parallel": {"autotp_size": size},
        **sections,
    }
