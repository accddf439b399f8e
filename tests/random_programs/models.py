"""The models: awkward ones of our own, whole or for ranks, and tiny ones of the Transformers library."""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.random_programs.experts import PlainMoE
from tests.random_programs.program import Model

HEAD = 4  # width of an attention head


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention on ``[batch, tokens, heads, width]``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    """Grouped heads; with a group its ranks share the sequence."""

    def __init__(self, width: int, heads: int, key_heads: int, group: Any) -> None:
        super().__init__()
        self.split = [heads, key_heads, key_heads]
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, HEAD * sum(self.split))
        self.out = nn.Linear(HEAD * heads, width)
        self.shared = None
        if group is not None:
            from deepspeed.sequence.layer import DistributedAttention

            self.shared = DistributedAttention(attend, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], -1, HEAD).split(self.split, dim=2)
        seen = attend(q, k, v) if self.shared is None else self.shared(q, k, v, 0)
        return x + self.out(seen.flatten(2))


class Mlp(nn.Module):
    """Two odd linears, with a parameter of three dimensions between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.rise = nn.Linear(width, inner)
        self.cube = nn.Parameter(torch.ones(1, 2, inner))
        self.fall = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.tanh(self.rise(self.norm(x))) * self.cube.mean(dim=1))


class Routed(nn.Module):
    """A layer of experts in the residual stream; also returns its term of the loss."""

    def __init__(self, width: int, inner: int, experts: int, k: int, ranks: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
        if ranks == 0:
            self.moe: nn.Module = PlainMoE(width, expert, experts, k)
            return
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            width, expert, experts, ranks, k, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, balance, _ = self.moe(x)
        return x + made, balance


def block_of(given: dict[str, Any], kind: str, number: int, group: Any, experts: int) -> nn.Module:
    """Returns a residual block. ``experts``: ranks that share experts, or 0 for the layer of plain torch."""
    width = given["width"]
    if kind == "attention":
        return Attention(width, given["heads"], given["key_heads"], group)
    if kind == "experts":
        return Routed(width, 5 + number, given["experts"], given["k"], experts)
    return Mlp(width, given["inner"] + 2 * number)


class Own(nn.Module):
    """Blocks between an embedding and a head, with whatever makes a model awkward.

    Args:
        given: See :func:`tests.random_programs.draw.draw_own`.
        group: Of ranks that share sequences, or None.
        experts: Ranks that share experts, or 0.
    """

    def __init__(self, given: dict[str, Any], group: Any = None, experts: int = 0) -> None:
        super().__init__()
        self.given = given
        width, vocabulary = given["width"], given["vocabulary"]
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(given["tokens"], width)
        blocks = [block_of(given, kind, number, group, experts) for number, kind in enumerate(given["blocks"])]
        self.names = [f"block_{number}" for number in range(len(blocks))]
        if given["container"] == "list":
            self.blocks: Any = nn.ModuleList(blocks)
        elif given["container"] == "dict":
            self.blocks = nn.ModuleDict(dict(zip(self.names, blocks, strict=True)))
        else:
            for name, block in zip(self.names, blocks, strict=True):
                setattr(self, name, block)
        self.branch = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, width))
        if given["unused"]:
            self.unused = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=given["head_bias"])
        if given["tied"]:
            self.head.weight = self.words.weight
        self.register_buffer("shift", torch.full((width,), 0.125))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self._freeze()

    def _freeze(self) -> None:
        frozen = self.given["frozen"]
        chosen = {
            "block": self._in_order()[-1].parameters(),
            "norms": [p for name, p in self.named_parameters() if "norm" in name],
            "biases": [p for name, p in self.named_parameters() if name.endswith("bias")],
            "words": self.words.parameters(),
            "places": self.places.parameters(),
        }
        for parameter in chosen.get(frozen, ()):
            parameter.requires_grad_(False)

    def _in_order(self) -> list[nn.Module]:
        if self.given["container"] == "list":
            return list(self.blocks)
        if self.given["container"] == "dict":
            return list(self.blocks.values())
        return [getattr(self, name) for name in self.names]

    def _run(self, block: nn.Module, x: torch.Tensor) -> Any:
        kind = self.given["recomputed"]
        if kind == "none" or not self.training:
            return block(x)
        return checkpoint(block, x, use_reentrant=kind == "reentrant")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, branch: bool = False) -> Any:
        """Returns logits and the balance of the experts, 0-dim."""
        x = self.words(ids) + self.places(positions) * self.gain + self.nothing.sum()
        x = x + self.shift.to(x.dtype)  # an fp32 buffer beside narrower weights
        balance = torch.zeros(())
        blocks = self._in_order()
        for block in [*blocks, blocks[0]] if self.given["twice"] else blocks:
            found = self._run(block, x)
            x, more = found if isinstance(found, tuple) else (found, 0.0)
            balance = balance + more
        if branch:
            x = x + self.branch(x)
        if self.given["borrowed"]:  # a weight used outside of its module
            x = x + F.linear(x, self.branch.weight) * 0.5
        if self.training:
            self.forwards += 1
        else:
            x = x * 1.25
        return self.head(self.norm(x)), balance


class First(nn.Module):
    """First pipeline layer: maps tokens and positions to the residual stream."""

    def __init__(self, vocabulary: int, tokens: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(tokens, width)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words(value[0]) + self.places(value[1]), torch.zeros(())


def unembed(module: nn.Module, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The head that shares the first layer's weight."""
    return value[0] @ module.words.weight.T, value[1]  # type: ignore[union-attr, operator]


class Step(nn.Module):
    """A block as a pipeline layer; passes the balance loss of the experts on."""

    def __init__(self, given: dict[str, Any], kind: str, number: int, group: Any, experts: int) -> None:
        super().__init__()
        self.block = block_of(given, kind, number, group, experts)
        if given["frozen"] == "norms":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("norm" not in name)
        if given["frozen"] == "block" and number == 0:
            self.requires_grad_(False)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.block(value[0])
        x, more = found if isinstance(found, tuple) else (found, 0.0)
        return x, value[1] + more


class Last(nn.Module):
    """The head of a row that ties nothing."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.norm(value[0])), value[1]


def row_parts(given: dict[str, Any], group: Any, experts: int) -> list[Any]:
    """The layers of a row as functions without arguments; ends that are tied are None."""
    steps = [
        functools.partial(Step, given, kind, number, group, experts) for number, kind in enumerate(given["blocks"])
    ]
    first = functools.partial(First, given["vocabulary"], given["tokens"], given["width"])
    if given["tied"]:
        return [None, *steps, None]
    return [first, *steps, functools.partial(Last, given["width"], given["vocabulary"])]


class PlainRow(nn.Module):
    """A row of layers without a pipeline, under the names that a pipeline gives them."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        if given["tied"]:
            self.tied_modules["words"] = First(given["vocabulary"], given["tokens"], given["width"])
        self.parts = row_parts(given, None, 0)
        for number, make in enumerate(self.parts):
            if make is not None:
                self.add_module(str(number), make())

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, branch: bool = False) -> Any:
        value: Any = (ids, positions)
        for number, make in enumerate(self.parts):
            if make is not None:
                value = self.get_submodule(str(number))(value)
            elif number == 0:
                value = self.tied_modules["words"](value)
            else:
                value = unembed(self.tied_modules["words"], value)
        return value


def row(given: dict[str, Any], group: Any, experts: int) -> list[Any]:
    """The layers of a row for ``PipelineModule``."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    made: list[Any] = []
    for number, make in enumerate(row_parts(given, group, experts)):
        if make is not None:
            made.append(LayerSpec(make.func, *make.args))
        else:
            more: dict[str, Any] = {"tied_weight_attr": "words.weight", **({"forward_fn": unembed} if number else {})}
            made.append(TiedLayerSpec("words", First, given["vocabulary"], given["tokens"], given["width"], **more))
    return made


def transformers_model(model: Model) -> nn.Module:
    """A causal model of the Transformers library."""
    import transformers

    given = model.given
    heads, width = given["heads"], HEAD * given["heads"]
    if model.kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=given["vocabulary"], n_positions=given["tokens"] + 3, n_embd=width, n_layer=given["layers"],
            n_head=heads, n_inner=given["inner"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=given["tied"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
            attn_implementation=given["attention"],
        )  # fmt: skip
    else:
        more: dict[str, Any] = {"attention_bias": given["bias"], "mlp_bias": given["bias"]}
        if model.kind == "mixtral":
            more = {"num_local_experts": given["experts"], "num_experts_per_tok": given["k"], "sliding_window": None}
            more["experts_implementation"] = "eager"  # the grouped product needs sizes that are multiples of 4
        name = {"llama": "LlamaConfig", "mixtral": "MixtralConfig"}[model.kind]
        config = getattr(transformers, name)(
            vocab_size=given["vocabulary"], hidden_size=width, intermediate_size=given["inner"],
            num_hidden_layers=given["layers"], num_attention_heads=heads, num_key_value_heads=given["key_heads"],
            head_dim=HEAD, max_position_embeddings=64, tie_word_embeddings=given["tied"], pad_token_id=0,
            attn_implementation=given["attention"], **more,
        )  # fmt: skip
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made.float()


def whole(model: Model) -> nn.Module:
    """The model for one process of plain torch."""
    if model.is_transformers:
        return transformers_model(model)
    return PlainRow(model.given) if model.kind == "row" else Own(model.given)


def run(model: Model, module: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Logits in fp32 and the balance of the experts, of a whole model or an engine."""
    if not model.is_transformers:
        logits, balance = module(batch["ids"], batch["positions"], batch["branch"])
        return logits.float(), balance
    inputs = {"input_ids": batch["ids"], "position_ids": batch["positions"]}
    if batch["mask"] is not None:
        inputs["attention_mask"] = batch["mask"]
    return module(**inputs, use_cache=False).logits.float(), 0.0
