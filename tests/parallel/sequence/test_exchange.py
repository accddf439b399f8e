"""What is cut along the sequence becomes cut along the heads, and back: shapes, values, gradients, bytes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from deepspeed.comm.base.counters import counted
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.attention import DistributedAttention, _SeqAllToAll
from deepspeed.parallel.sequence.exchange import exchange, in_equal_parts, length_of, shares_of_heads
from tests.harness import on_ranks


def test_shares_of_heads():
    assert shares_of_heads(28, 7, 4).key == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert shares_of_heads(28, 7, 4).query == ((0, 8), (8, 16), (16, 24), (24, 28))
    assert shares_of_heads(7, 1, 4).query == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert shares_of_heads(7, 1, 4).key == ((0, 1),) * 4
    assert shares_of_heads(12, 3, 4).key == ((0, 1), (0, 1), (1, 2), (2, 3))
    for key_heads in range(1, 9):
        for group in range(1, 5):
            for ranks in range(1, 9):
                try:
                    shares = shares_of_heads(key_heads * group, key_heads, ranks)
                except DeepSpeedConfigError:
                    assert ranks > key_heads and -(-ranks // key_heads) > group
                    continue
                covered = [head for start, end in shares.query for head in range(start, end)]
                assert covered == list(range(key_heads * group))
                for query, key in zip(shares.query, shares.key, strict=True):
                    assert length_of(query) and length_of(query) % length_of(key) == 0
                    ratio = length_of(query) // length_of(key)
                    owners = {head // group for head in range(*query)}
                    assert owners == set(range(*key)) and (length_of(key) == 1 or ratio == group)


def test_too_few_heads_are_refused():
    with pytest.raises(DeepSpeedConfigError, match=r"4 heads with 2 key head.* over 6 ranks.*use at most 4"):
        shares_of_heads(4, 2, 6)
    with pytest.raises(DeepSpeedConfigError, match="found 5 and 2"):
        shares_of_heads(5, 2, 2)


def _mine(whole, axis, share):
    return whole.narrow(axis, share[0], length_of(share))


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_there_and_back_is_the_identity() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for axes, shape in (((1, 2), (2, 12, 5, 3)), ((0, 2), (12, 2, 5, 3)), ((2, 1), (3, 5, 12, 2))):
        tokens, head_axis = axes
        whole = torch.arange(360.0).view(shape)
        lengths = [5, 4, 2, 1][:size] if size == 4 else [7, 5]
        start = sum(lengths[:rank])
        heads = in_equal_parts(5, size)
        mine = _mine(whole, tokens, (start, start + lengths[rank])).clone().requires_grad_()
        inside = exchange(mine, None, tokens, head_axis, heads=heads, lengths=lengths)
        assert torch.equal(inside, _mine(whole, head_axis, heads[rank]))
        returned = exchange(inside * 2, None, tokens, head_axis, back=True, heads=heads, lengths=lengths)
        assert torch.equal(returned, 2 * mine)
        (returned * mine.detach()).sum().backward()
        assert torch.equal(mine.grad, 2 * mine.detach())
        # The same head on all ranks: its gradient is the sum over them.
        one = _mine(whole, tokens, (start, start + lengths[rank]))[..., :2].narrow(head_axis, 0, 1)
        one = one.clone().requires_grad_()
        shared = exchange(one, None, tokens, head_axis, heads=[(0, 1)] * size, lengths=lengths)
        assert torch.equal(shared, whole[..., :2].narrow(head_axis, 0, 1))
        (shared * (rank + 1)).sum().backward()
        assert torch.equal(one.grad, torch.full_like(one, sum(range(1, size + 1))))
    with pytest.raises(DeepSpeedConfigError, match="13 tokens cannot be cut"):
        exchange(torch.zeros(1, 13, size, 2), None, 1, 2, back=True)
    with pytest.raises(DeepSpeedConfigError, match="expected 6 and 4 elements there, found 5 and 4"):
        exchange(torch.zeros(1, 4, 5, 2), None, 1, 2, heads=in_equal_parts(6, size))


def _dense(query, key, value, tokens_axis=1):
    q, k, v = (x.transpose(1, 2) if tokens_axis == 1 else x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2) if tokens_axis == 1 else out.permute(2, 0, 1, 3)


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_distributed_attention_is_attention() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for heads, key_heads in ((4, 4), (4, 2), (7, 1), (7, 7)):
        for batch_axis in (0, 1):
            generator = torch.Generator().manual_seed(heads)
            tokens = 1 - batch_axis
            shapes = [(8, count) for count in (heads, key_heads, key_heads)]
            whole = [
                torch.randn((3, s, h, 6) if batch_axis == 0 else (s, 3, h, 6), generator=generator).requires_grad_()
                for s, h in shapes
            ]
            expected = _dense(*whole, tokens)
            weight = torch.randn(expected.shape, generator=generator)
            expected_grads = torch.autograd.grad((expected * weight).sum(), whole)
            share = in_equal_parts(8, size)[rank]
            mine = [_mine(x.detach(), tokens, share).clone().requires_grad_() for x in whole]
            layer = DistributedAttention(_dense, dist.group.WORLD, 2, 0, num_kv_heads=key_heads)
            found = layer(*mine, batch_axis, None, tokens)
            torch.testing.assert_close(found, _mine(expected.detach(), tokens, share), rtol=1e-5, atol=1e-5)
            (found * _mine(weight, tokens, share)).sum().backward()
            for x, gradient in zip(mine, expected_grads, strict=True):
                torch.testing.assert_close(x.grad, _mine(gradient, tokens, share), rtol=1e-5, atol=1e-5)
    # Rotary embedding after the exchange, with the positions of all tokens.
    angle = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.5])
    rotary = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    x = torch.randn(1, 8, 4, 6, generator=torch.Generator().manual_seed(1))
    seen = {}

    def look(query, key, value):
        seen.update(query=query)
        return query

    DistributedAttention(look, dist.group.WORLD)(*(_mine(x, 1, share),) * 3, 0, rotary)
    heads = in_equal_parts(4, size)[rank]
    a, b, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    cos, sin = (part[None, :, None, :2] for part in rotary)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    torch.testing.assert_close(seen["query"], _mine(turned, 2, heads))
    with pytest.raises(DeepSpeedConfigError, match="num_kv_heads is 2, but the key has 4 heads"):
        DistributedAttention(look, None, num_kv_heads=2)(*(_mine(x, 1, share),) * 3, 0)


@on_ranks(2)
def test_the_exchange_under_its_other_name() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for batch_axis, shape in ((0, (2, 8, 5, 3)), (1, (8, 2, 5, 3))):
        tokens = 1 - batch_axis
        whole = torch.arange(240.0).view(shape)
        mine = _mine(whole, tokens, in_equal_parts(8, size)[rank]).clone().requires_grad_()
        inside = _SeqAllToAll.apply(dist.group.WORLD, mine, 2, tokens, batch_axis)
        assert torch.equal(inside, _mine(whole, 2, in_equal_parts(5, size)[rank])) and inside.is_contiguous()
        returned = _SeqAllToAll.apply(dist.group.WORLD, inside, tokens, 2, batch_axis)
        assert torch.equal(returned, mine)
        (returned * returned.detach()).sum().backward()
        assert torch.equal(mine.grad, mine.detach())


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_bytes_fall_with_the_number_of_ranks() -> None:
    """A block's attention moves 4 tensors of s / sp x M, each but for the part that stays."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layer = DistributedAttention(_dense, dist.group.WORLD)
    mine = [torch.randn(1, 16 // size, 4, 8, requires_grad=True) for _ in range(3)]
    with counted() as traffic:
        out = layer(*mine, 0)
        one_way = 4 * (16 // size * 4 * 8) * 4 * (size - 1) // size
        assert traffic.requested_along["all_to_all", "sequence"].nbytes == one_way, (rank, traffic.requested_along)
        out.sum().backward()
        assert traffic.requested_along["all_to_all", "sequence"].nbytes == 2 * one_way
