"""The models that tests train: small, of odd sizes, without dropout, with the same values wherever they are requested.

| model | for |
|---|---|
| :class:`Layer` | one residual unit, to build others from |
| :class:`Tower`, :func:`tower` | a stack of units whose forward returns the loss: most tests of one behavior |
| :class:`RoutedTower` | a tower of which a forward runs some units only, in any order |
| :class:`Awkward`, :func:`awkward` | all at once that has broken sharded trainers, with its batches and losses |
| :func:`causal_model`, :func:`masked_model` | a language model of Transformers by its family and sizes; a BERT |

A model with one peculiarity that one test is about stands in the file of that test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

TOWER_WIDTH = 9
VOCABULARY, WIDTH, HIDDEN, LENGTH, SAMPLES = 13, 7, 37, 5, 2  # of Awkward and its batches


class Layer(nn.Module):
    """One residual unit of two linears, with a norm in front if wanted. Rank boundaries cut it at odd places."""

    def __init__(
        self,
        width: int = TOWER_WIDTH,
        inner: int = 17,
        *,
        has_norm: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        if has_norm:
            self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, inner)
        self.fall = nn.Linear(inner, width)
        self.has_norm, self.activation = has_norm, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(self.activation(self.rise(self.norm(x) if self.has_norm else x)))


class Tower(nn.Module):
    """A stack of units with an outer linear on each side; returns the loss."""

    def __init__(self, depth: int = 4, width: int = TOWER_WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.bias.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.last(x).float().square().mean()


def tower(depth: int = 4, seed: int = 3) -> Tower:
    """Returns a tower with the values of ``seed``."""
    torch.manual_seed(seed)
    return Tower(depth)


class RoutedTower(nn.Module):
    """Four units; the numbers in ``route`` say which of them run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, route: Sequence[int]) -> torch.Tensor:
        for index in route:
            x = self.layers[index](x)
        return x.square().mean()


@dataclass
class Batch:
    """One micro-batch of one rank.

    Attributes:
        tokens: SAMPLES x LENGTH, int64.
        targets: The same.
        branch: Which of the two branches of the model runs; equal on all ranks.
        boost: Factor on the loss; infinity makes the gradients overflow.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    branch: bool
    boost: float = 1.0


def make_batch(*position: int, branch: bool = True, boost: float = 1.0) -> Batch:
    """Returns the batch at ``position`` (step, micro-batch, rank, ...): the same numbers wherever it is requested."""
    seed = 17
    for number in position:
        seed = seed * 1009 + number + 1
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    return Batch(tokens, targets, branch, boost)


@dataclass
class Losses:
    """What the awkward model returns by default: two losses of one forward, both fp32 scalars."""

    loss: torch.Tensor
    auxiliary: torch.Tensor


class Awkward(nn.Module):
    """A model with tied, frozen, unused, empty, scalar and root parameters, a block used twice, and a branch."""

    def __init__(self, output: str = "dataclass") -> None:
        super().__init__()
        self.output = output
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.linspace(-0.2, 0.3, WIDTH))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.blocks = nn.ModuleList(Layer(WIDTH, HIDDEN, has_norm=True) for _ in range(3))
        self.frozen = Layer(WIDTH, HIDDEN, has_norm=True)
        self.frozen.requires_grad_(False)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.full((1, WIDTH), 0.125))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, batch: Batch) -> Any:
        x = self.embed(batch.tokens) * self.gain + self.shift
        x = x + self.offset.to(x.dtype)  # an fp32 buffer beside narrower weights, as they are in Transformers
        x = torch.cat([x.flatten(0, 1), self.empty]).view_as(x)
        for index in (0, 1, 2, 1):
            x = self.blocks[index](x)
        x = self.frozen(x)
        x = self.left(x) if batch.branch else self.right(x)
        x = self.norm(x)
        logits = self.head(x).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) * batch.boost
        auxiliary = x.float().pow(3).mean() + 0.1 * self.shift.float().pow(2).sum()
        if self.output == "dict":
            return {"loss": loss, "extra": {"auxiliary": auxiliary}, "text": "not a tensor"}
        if self.output == "tuple":
            return loss, (auxiliary, None, 3)
        return Losses(loss, auxiliary)


def losses_of(output: Any) -> Losses:
    """Returns the two losses from whichever form :class:`Awkward` returned them."""
    if isinstance(output, dict):
        return Losses(output["loss"], output["extra"]["auxiliary"])
    if isinstance(output, tuple):
        return Losses(output[0], output[1][0])
    return output


def awkward(output: str = "dataclass", seed: int = 5) -> Awkward:
    """Returns the awkward model with the values of ``seed``."""
    torch.manual_seed(seed)
    return Awkward(output)


def param_groups(model: nn.Module, *, lr: float = 0.01, with_empty: bool = True) -> list[dict[str, Any]]:
    """Two interleaved groups, as training scripts make them: matrices decay, the rest does not and moves faster.

    Args:
        model: Its trained parameters.
        lr: Of the first group.
        with_empty: Parameters without elements too; some optimizers divide by their size.
    """
    trained = [p for p in model.parameters() if p.requires_grad and (with_empty or p.numel())]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1, "lr": lr},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2 * lr},
    ]


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # of a GPT2


def causal_model(family: str = "Llama", *, seed: int = 0, head: str = "ForCausalLM", **sizes: Any) -> Any:
    """Returns a language model of Transformers with the values of ``seed``.

    Args:
        family: What its classes begin with, as in ``LlamaConfig`` and ``LlamaForCausalLM``, or ``GPT2LMHeadModel``.
        seed: Set before it is built.
        head: What its class ends with; :func:`masked_model` has the one of BERT.
        **sizes: Arguments of the configuration.
    """
    transformers = pytest.importorskip("transformers")  # its releases need Python 3.11
    config = getattr(transformers, f"{family}Config")(**sizes)
    ending = "LMHeadModel" if family == "GPT2" else head
    torch.manual_seed(seed)
    return getattr(transformers, family.removesuffix("Text") + ending)(config)


def tiny_gpt() -> Any:
    """A GPT2 of two layers with three heads, 12 wide, over 20 tokens."""
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 20, "n_positions": 16}
    return causal_model("GPT2", **sizes, bos_token_id=0, eos_token_id=0, use_cache=False, **NO_DROPOUT)


def masked_model(*, head: str = "ForMaskedLM", **sizes: Any) -> Any:
    """Returns a BERT without dropout; arguments are those of :func:`causal_model`."""
    return causal_model("Bert", head=head, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
