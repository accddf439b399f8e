"""Small models for tensor parallelism, and a plain torch run of one rank to compare with."""

from typing import Any

import torch
from torch import nn

from tests.harness import training
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


def short_loss_of(model: Any, step: int, data: int) -> torch.Tensor:
    """Of 8 tokens, which two ranks divide."""
    batch = ids(step, data, 8)
    return model(input_ids=batch, labels=batch).loss


def plain_run(model: nn.Module, steps: int, data: int, accumulation: int = 1, **more: Any) -> training.Expected:
    """Trains a copy of the whole model in plain torch: see :func:`tests.harness.training.plain_run`."""
    return training.plain_run(model, steps, data, accumulation, **{"loss": loss_of, "optimizer": adamw, **more})


def config(size: int, stage: int, **sections: Any) -> dict[str, Any]:
    """A configuration of a model that is cut over ``size`` ranks."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "tensor_parallel": {"autotp_size": size},
        **sections,
    }
