"""Towers that only some ranks use, since the others have text only: trained at stage 3 as by plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import DivergenceError
from tests.ecosystem.support import needs_transformers
from tests.engine.support import WIDTH, engine_of, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Layer
from tests.zero.gather.beside_torch import LIMITS, weights_of_torch
from tests.zero.reading import full_masters

Images = Callable[[int, int], bool]
"""``images(step, rank)``: whether the batch of a rank has images."""


class Seeing(nn.Module):
    """A decoder of some layers with a tower, whose result is added where there are images."""

    def __init__(self, tower: str = "trained") -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.tower = nn.Sequential(Layer(), Layer())
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)
        self.is_frozen = tower == "frozen"
        self.tower.requires_grad_(not self.is_frozen)

    def forward(self, tokens, images):
        x = self.words(tokens)
        if images is not None:
            with torch.set_grad_enabled(not self.is_frozen):
                seen = self.tower(images)
            x = x + seen.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _own_loss(images: Images) -> Callable[[nn.Module, int, int], torch.Tensor]:
    def loss(model, step, of):
        made = torch.Generator().manual_seed(50 * step + of)
        tokens, pixels = torch.randint(11, (2, 5), generator=made), torch.randn(2, WIDTH, generator=made)
        return model(tokens, pixels if images(step, of) else None)

    return loss


def _only_rank_0(step: int, of: int) -> bool:
    return of == 0 and step != 3


def _late(step: int, of: int) -> bool:
    return of == 0 and step >= 2


def _in_turn(step: int, of: int) -> bool:
    return step % 2 == of


def _compare(make: Callable[[], nn.Module], loss: Any, zero: dict[str, Any]) -> None:
    torch.manual_seed(3)
    engine = engine_of(make(), 3, zero=zero)
    for step in range(5):
        engine.backward(loss(engine, step, rank()))
        engine.step()
    expected = weights_of_torch(make, loss, steps=5, ranks=dist.get_world_size())
    found = full_masters(engine)
    assert_states_equal(found, {name: expected[name] for name in found}, rtol=1e-4, atol=1e-5)


def _own(cases: list[tuple[str, Images, str]]) -> None:
    for tower, images, agreement in cases:
        for limits in LIMITS.values():
            _compare(lambda kind=tower: Seeing(kind), _own_loss(images), {**limits, "agreement": agreement})


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tower_that_some_ranks_use(ranks):
    run_ranks(_own, ranks, [("trained", _only_rank_0, "adapt"), ("frozen", _in_turn, "adapt")])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tower_that_no_rank_uses_at_first(ranks):
    run_ranks(_own, ranks, [("trained", _late, "serve"), ("frozen", _late, "serve")])


@on_ranks(2)
def test_what_is_not_served_names_the_key():
    for images, agreement in ((_only_rank_0, "error"), (_late, "adapt")):
        engine = engine_of(Seeing(), 3, zero={**LIMITS["default"], "agreement": agreement})
        with pytest.raises(DivergenceError, match='[Ss]et zero_optimization.agreement to "serve"'):
            for step in range(5):
                engine.backward(_own_loss(images)(engine, step, rank()))
                engine.step()


def _llava() -> nn.Module:
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=39)
    return transformers.LlavaForConditionalGeneration(config).train()


def _llava_loss(images: Images) -> Callable[[nn.Module, int, int], torch.Tensor]:
    def loss(model, step, of):
        made = torch.Generator().manual_seed(50 * step + of)
        tokens = torch.randint(3, 36, (2, 13), generator=made)
        batch = {"labels": tokens.clone(), "use_cache": False}
        if images(step, of):
            tokens[:, 4:8] = 39
            batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=made)
        return model(input_ids=tokens, **batch).loss

    return loss


@needs_transformers
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_llava_with_text_only_batches_on_some_ranks() -> None:
    cases = [(_only_rank_0, "adapt"), (_late, "serve")]
    for images, agreement in cases:
        for limits in LIMITS.values():
            _compare(_llava, _llava_loss(images), {**limits, "agreement": agreement})
