"""Packed documents in one call of torch's attention of sequences of any lengths, which CPUs lack."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from deepspeed.parallel.sequence import packed
from deepspeed.parallel.sequence.context import PackedRow
from deepspeed.parallel.sequence.transformers_attention import attend
from tests.harness.device import simulated_device

TOKENS, WIDTH = 48, 16
MANY = PackedRow((1,) * (TOKENS - 8) + (8,))
PADDED = PackedRow((5, 3), torch.tensor([2, 3, 4, 5, 6, 20, 21, 22]))


def _by_mask(query: Any, key: Any, value: Any, begins: Any, begins_k: Any, most: int, most_k: int, **more: Any) -> Any:
    """What torch documents, by a mask: ``[tokens, heads, width]``, causal by a right side of 0."""
    assert begins is begins_k and most == most_k == int(begins.diff().max()) and begins.dtype == torch.int32
    numbers = torch.repeat_interleave(torch.arange(len(begins) - 1, device=query.device), begins.diff().long())
    position = torch.arange(len(query), device=query.device)
    near = position[:, None] - position
    left, right = more["window_size"]
    mask = (numbers[:, None] == numbers) & (near <= (math.inf if left < 0 else left))
    mask &= near >= (-math.inf if right < 0 else -right)
    parts = (tensor.transpose(0, 1) for tensor in (query, key, value))
    options = {"scale": more["scale"], "enable_gqa": more["enable_gqa"]}
    return functional.scaled_dot_product_attention(*parts, attn_mask=mask, **options).transpose(0, 1)


@pytest.mark.parametrize(
    ("documents", "options"),
    [
        ((MANY, MANY), {}),
        ((MANY, PackedRow((20, 28))), {"is_causal": False}),
        ((PADDED, PackedRow((TOKENS,), torch.arange(TOKENS))), {"scale": 0.3}),
        ((PackedRow((30, 18)), PADDED), {"window": 4}),
        ((PADDED, PackedRow((), torch.empty(0, dtype=torch.long))), {}),
    ],
    ids=["many", "full", "padded", "window", "empty"],
)
def test_one_call_equals_a_call_per_document(
    documents: tuple[PackedRow, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed._is_known():
        pytest.skip("this torch has another varlen_attn")
    calls: list[int] = []

    def counting(*arguments: Any, **more: Any) -> Any:
        calls.append(len(arguments[3]) - 1)
        return _by_mask(*arguments, **more)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", counting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, WIDTH), (2, 2, TOKENS, WIDTH), (2, 2, TOKENS, WIDTH))
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    gradient = torch.randn(shapes[0], generator=generator).bfloat16()
    found = []
    for on_device in (False, True):
        mine = [tensor.clone().requires_grad_() for tensor in tensors]
        with simulated_device():
            there = [tensor.to("cuda") if on_device else tensor for tensor in mine]
            out = attend(*there, documents=documents, **options)
            out.backward(gradient.to(out.device))
            found.append([out.detach().cpu(), *(tensor.grad for tensor in mine)])
    assert calls == [sum(len(row.lengths) for row in documents)]
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


def test_what_one_call_does_not_support() -> None:
    """Other devices, fp32, dropout, and values of another width keep one call per document."""
    x = torch.zeros(1, 1, 4, WIDTH, dtype=torch.bfloat16)
    assert not packed.attends_at_once(x, x, x, 0.0)
    with simulated_device():
        there = x.to("cuda")
        assert not packed.attends_at_once(there.float(), there, there, 0.0)
        assert not packed.attends_at_once(there, there, there, 0.1)
        assert not packed.attends_at_once(there, there, there[..., :8], 0.0)
