"""Losses and distributions of logits that ranks share by vocabulary and by tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.sequence.cross_entropy import VocabParallelCrossEntropyLoss
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_entropy, vocab_parallel_kl_div, vocab_parallel_logprobs
from tests.harness import on_ranks

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 6, 8, 22


def _whole():
    torch.manual_seed(3)
    hidden, weight = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    labels = torch.randint(20, (BATCH, TOKENS))
    labels[0, :3] = labels[1, 5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _own(whole, low, high, dim=0):
    return whole.detach().narrow(dim, low, high - low).clone().requires_grad_()


@on_ranks(2)
def test_over_two_ranks() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, labels = _whole()
    logits = hidden @ weight.t()
    low, high = ((0, 9), (9, VOCABULARY))[rank]  # uneven parts
    own, uneven = _own(logits, low, high, -1), {"vocab_start_index": low, "vocab_end_index": high}

    # Log-probabilities; the last two columns are padding.
    expected = logits[..., :20].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = expected.masked_fill(labels == -100, 0)
    found = vocab_parallel_logprobs(own, labels, group, **uneven, global_vocab_size=20)
    torch.testing.assert_close(found, expected)
    of_logits = torch.autograd.grad(expected.square().sum(), logits, retain_graph=True)[0][..., low:high]
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), own)[0], of_logits)
    several = torch.stack((labels.clamp(min=0), labels.clamp(max=0)), -1)
    found = vocab_parallel_logprobs(own, several, group, **uneven, global_vocab_size=20)
    torch.testing.assert_close(found[..., 0], logits[..., :20].log_softmax(-1).gather(-1, several[..., :1]).squeeze(-1))
    assert not found[..., 1][labels == -100].any()
    with pytest.raises(IndexError, match="0 to 19"):
        vocab_parallel_logprobs(own, labels.clamp(min=0) + 20, group, **uneven, global_vocab_size=20)
    with pytest.raises(DeepSpeedConfigError, match="dimension more"):
        vocab_parallel_logprobs(own, labels[0], group, **uneven)
    with pytest.raises(DeepSpeedConfigError, match="range"):
        vocab_parallel_logprobs(own, labels, group, vocab_start_index=low, vocab_end_index=high + 1)

    # Entropies and divergences, in equal parts.
    half = VOCABULARY // 2
    student, teacher = logits, (logits * 0.5).flip(-1)
    parts = [_own(one, rank * half, rank * half + half, -1) for one in (student, teacher)]
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(vocab_parallel_entropy(parts[0], group), -(log_s.exp() * log_s).sum(-1))
    torch.testing.assert_close(
        vocab_parallel_kl_div(*parts, tp_group=group),
        functional.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1),
    )
    torch.testing.assert_close(
        vocab_parallel_kl_div(*parts, reverse=True, tp_group=group),
        functional.kl_div(log_t, log_s, log_target=True, reduction="none").sum(-1),
    )

    # Losses: of logits, of hidden states, and of hidden states whose tokens are shared instead.
    for reduction in ("mean", "sum", "none"):
        whole = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        whole = whole.view(labels.shape) if reduction == "none" else whole
        loss = VocabParallelCrossEntropyLoss(group, reduction=reduction, **uneven)
        torch.testing.assert_close(loss(own, labels), whole)
        mine = _own(hidden, 0, BATCH), _own(weight, low, high)
        found = vocab_parallel_linear_cross_entropy(*mine, labels, None, group, **uneven, reduction=reduction)
        torch.testing.assert_close(found, whole)
        gradients = torch.autograd.grad(whole.sum(), (hidden, weight), retain_graph=True)
        own_gradients = torch.autograd.grad(found.sum(), mine)
        torch.testing.assert_close(own_gradients[0], gradients[0])
        torch.testing.assert_close(own_gradients[1], gradients[1][low:high])
        if reduction == "none":
            continue
        tokens = slice(3 * rank, 3 * rank + 3)
        mine = hidden.detach()[:, tokens].clone().requires_grad_(), weight.detach().clone().requires_grad_()
        found = vocab_parallel_linear_cross_entropy(
            *mine, labels[:, tokens], sp_group=group, reduction=reduction, chunk_size=2, own_share=True
        )
        torch.testing.assert_close(found, whole)
        torch.testing.assert_close(torch.autograd.grad(found, mine)[0], gradients[0][:, tokens])
        loss = VocabParallelCrossEntropyLoss(sp_group=group, reduction=reduction)
        torch.testing.assert_close(loss(logits.detach()[:, tokens], labels[:, tokens]), whole)
    for wrong in ({"backend": "triton"}, {"reduction": "max"}):
        with pytest.raises(DeepSpeedConfigError, match="expected one of"):
            VocabParallelCrossEntropyLoss(**wrong)
