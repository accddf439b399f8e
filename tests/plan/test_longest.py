"""The longest sequence that fits is found with few plans, whatever memory does with the length."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

import deepspeed
from deepspeed.plan import longest
from deepspeed.zero.placement import Tier
from tests.ecosystem.support import needs_transformers

USABLE = 1_000_000


def _pretended(tokens: int, *moments: Any) -> Any:
    """What the search reads of a plan, of which each moment's memory is a function of the tokens."""
    tops = {Tier.DEVICE: {str(n): int(moment(tokens)) for n, moment in enumerate(moments)}, Tier.HOST: {}}
    peaks = {tier: SimpleNamespace(nbytes=max(found.values(), default=0)) for tier, found in tops.items()}
    most = peaks[Tier.DEVICE].nbytes
    return SimpleNamespace(
        request=SimpleNamespace(sequence_length=tokens),
        machine=SimpleNamespace(usable=USABLE, devices_per_node=1),
        parts=[SimpleNamespace(simulated=SimpleNamespace(tops=tops, peaks=peaks))],
        device_bytes=most,
        fits=most <= USABLE,
        would_fit=lambda device, host: device <= USABLE,
    )


@pytest.mark.parametrize(
    ("moments", "most"),
    [
        pytest.param([lambda n: 100 + 7 * n], 4, id="one line"),
        pytest.param([lambda n: 300_000 + n, lambda n: 5 * n, lambda n: 100_000 + 2 * n], 5, id="several moments"),
        pytest.param([lambda n: 900_000, lambda n: 0.5 * n], 6, id="flat, then steep"),
        pytest.param([lambda n: 20 * min(n, 8192) + 0.25 * n], 9, id="tiles that are full one day"),
        pytest.param([lambda n: 0.001 * n * n], 10, id="squares"),
        pytest.param([lambda n: 40_000 * math.log2(n)], 60, id="logarithm"),
        pytest.param([lambda n: 200_000 * (n > 30_000) + 200_000 * (n > 5_000) + 3 * n], 25, id="steps"),
        pytest.param([lambda n: 600 * n], 2, id="nothing but one grain"),
        pytest.param([lambda n: 450 * n], 4, id="two grains"),
    ],
)
def test_the_search(monkeypatch: pytest.MonkeyPatch, moments: Any, most: int) -> None:
    made = []

    def planned(_request: Any, tokens: int) -> Any:
        made.append(tokens)
        return _pretended(tokens, *moments)

    monkeypatch.setattr(longest, "_planned", planned)
    found = longest.longest_sequence(SimpleNamespace(config={}))  # type: ignore[arg-type]
    tokens = found.request.sequence_length
    assert found.fits and tokens % 1024 == 0 and not _pretended(tokens + 1024, *moments).fits
    assert len(made) == len(set(made)) <= most, made


def test_what_memory_does_not_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "_planned", lambda _request, tokens: _pretended(tokens, lambda n: 5))
    found = longest.longest_sequence(SimpleNamespace(config={}))  # type: ignore[arg-type]
    assert found.request.sequence_length == 1 << 32


@needs_transformers
def test_a_model_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the logits' tile is the highest, later what layers keep; a long plan costs as much as all its tiles."""
    from transformers import LlamaConfig

    model = LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel": {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 1024},
    }
    given: Any = {"device": "cpu", "device_memory": "96MiB", "activation_checkpointing": True}
    made: list[int] = []
    planned = longest._planned

    def counted(request: Any, tokens: int) -> Any:
        made.append(tokens)
        return planned(request, tokens)

    monkeypatch.setattr(longest, "_planned", counted)
    found = deepspeed.plan(model, config, longest=True, **given)
    tokens = found.request.sequence_length
    assert found.fits and len(made) <= 5 and sum(made) < 2 * tokens, made
    longer = deepspeed.plan(
        model, config, sequence_length=tokens + 1024, suggest=False, compare_checkpointing=False, **given
    )
    assert not longer.fits
