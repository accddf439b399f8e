"""Models of odd sizes: a stack of blocks, alone, in a pipeline, with experts, and a Llama."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 24
TOKENS = 8
ROWS = 2


class Block(nn.Module):
    """A residual unit with a norm, a scalar parameter and a layer without a bias."""

    def __init__(self, width: int, is_frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.gate = nn.Parameter(torch.tensor(1.0))
        if is_frozen:
            self.up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate.to(x.dtype) * self.down(F.gelu(self.up(self.norm(x))))


class AdapterBlock(Block):
    """A block whose second layer is a frozen base with adapters; the ranks may share the base."""

    def __init__(self, width: int, is_shared: bool) -> None:
        from deepspeed.linear import LoRAConfig, OptimizedLinear

        super().__init__(width)
        ranks = dist.get_world_size() if is_shared else 1
        config = LoRAConfig(lora_r=2, lora_alpha=4, base_weight_sharding=ranks)
        self.down = OptimizedLinear(2 * width + 1, width, lora_config=config, dtype=torch.float32)


class WordModel(nn.Module):
    """Words, three blocks and a head; returns the loss.

    Args:
        width: Of the hidden states.
        tied: The head has the weight of the words.
        frozen: A weight of the second block is frozen.
        unused: A layer takes no part in the forward.
        sparse: The gradient of the words is sparse.
        counts: Buffers count the forwards in training and average the hidden states.
        adapters: The second block has adapters.
        shared_base: The ranks share the weight below the adapters.
    """

    def __init__(
        self,
        width: int = 9,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        sparse: bool = False,
        counts: bool = False,
        adapters: bool = False,
        shared_base: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, sparse=sparse)
        self.blocks = nn.ModuleList(
            AdapterBlock(width, shared_base) if adapters and number == 1 else Block(width, frozen and number == 1)
            for number in range(3)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if unused:
            self.spare = nn.Linear(3, 5)
        self.counts = counts
        if counts:
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("mean", torch.zeros(width))

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        skip: int | None = None,
        curriculum_seqlen: int | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        ids, labels = ids[:, :curriculum_seqlen], labels[:, :curriculum_seqlen]
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        if self.counts and self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        return word_loss(self.head(x), labels)

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the ids with a most likely next one, as the hybrid engine calls it."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return torch.cat((ids, self.head(x[:, -1:]).argmax(dim=-1)), 1)


def word_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch_of(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids and labels of a micro-batch of a data rank: ``[ROWS, TOKENS]`` each."""
    random = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=random)
    return ids, (ids * 5 + 1) % VOCABULARY


# -- layers of a pipeline ---------------------------------------------------------------------------------------------


class Words(nn.Module):
    """The first layer of a pipeline that ties nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


class Head(nn.Module):
    """The last layer of a pipeline that ties nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def unembed(words: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    """Returns logits by the words' weight."""
    return x @ words.weight.t().to(x.dtype)


def pipeline_model(width: int, stages: int, *, tied: bool, recompute: int, schedule: str, seed: int) -> Any:
    """Returns a ``PipelineModule`` of six blocks between its ends. Every rank must call it."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    blocks = [LayerSpec(Block, width) for _ in range(6)]
    if tied:
        first = TiedLayerSpec("words", nn.Embedding, VOCABULARY, width)
        last = TiedLayerSpec("words", nn.Embedding, VOCABULARY, width, forward_fn=unembed)
        layers = [first, *blocks, LayerSpec(nn.LayerNorm, width), last]
    else:
        layers = [LayerSpec(Words, width), *blocks, LayerSpec(Head, width)]
    return PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=word_loss,
        seed_layers=True,
        base_seed=seed,
        activation_checkpoint_interval=recompute,
        **({"schedule": schedule} if schedule else {}),
    )


# -- experts and attention --------------------------------------------------------------------------------------------


class ExpertBlock(nn.Module):
    """A residual unit with four experts, of which each token uses one; no token is dropped."""

    def __init__(self, width: int, ranks: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 11), nn.GELU(), nn.Linear(11, width))
        self.moe = MoE(width, expert, num_experts=4, ep_size=ranks, k=1, drop_tokens=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


class ExpertModel(nn.Module):
    """Words, two blocks with experts between them, and a head; returns the loss."""

    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.words = Words(width)
        self.blocks = nn.ModuleList((Block(width), ExpertBlock(width, ranks), Block(width)))
        self.head = Head(width)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, curriculum_seqlen: int | None = None, **_others: Any
    ) -> torch.Tensor:
        ids, labels = ids[:, :curriculum_seqlen], labels[:, :curriculum_seqlen]
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return word_loss(self.head(x), labels)


def llama_model(*, tied: bool) -> nn.Module:
    """Returns a Llama of two layers and four heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        tie_word_embeddings=tied,
    )
    made: nn.Module = LlamaForCausalLM(config)
    return made
