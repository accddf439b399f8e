"""Losses without whole logits equal those of whole logits, and make no tensor of their size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed.ops
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.fused_loss import ChunkedCausalLMLoss
from deepspeed.ops.vocabulary import cut_cross_entropy, cut_divergence, cut_entropy, cut_log_probs
from tests.harness.loopback import run_threads

ROWS, WIDTH, VOCABULARY = 37, 12, 101


def _problem(dtype=torch.float32, rows=ROWS, vocabulary=VOCABULARY, ignored=0.3):
    torch.manual_seed(0)
    labels = torch.randint(vocabulary, (rows,))
    labels[torch.rand(rows) < ignored] = -100
    tensors = torch.randn(rows, WIDTH), torch.randn(vocabulary, WIDTH), torch.randn(vocabulary)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], labels


def _plain(hidden, weight, bias, labels, softcap=None, reduction="mean"):
    logits = functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return losses if reduction == "none" else losses.sum() / ((labels != -100).sum() if reduction == "mean" else 1)


def _gradients(loss, tensors):
    factors = torch.linspace(0.5, 1.5, loss.numel()).view_as(loss)
    return torch.autograd.grad((loss * factors).sum(), tensors, retain_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_the_loss_of_whole_logits(reduction, softcap, dtype):
    tensors, labels = _problem(dtype)
    expected = _plain(*tensors, labels, softcap, reduction)
    found = deepspeed.ops.linear_cross_entropy(*tensors[:2], labels, tensors[2], softcap=softcap, reduction=reduction)
    bound = 2e-2 if dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=bound, atol=bound)
    for one, other in zip(_gradients(found, tensors), _gradients(expected, tensors), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))


class _Counts(TorchDispatchMode):
    """The multiplications of products, in those of one product of the head; and the largest tensor but its weight's."""

    def __init__(self, rows, vocabulary):
        super().__init__()
        self.products = 0.0
        self.largest = 0
        self._rows, self._vocabulary = rows, vocabulary

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.products += left.numel() * right.shape[1] / (self._rows * WIDTH * self._vocabulary)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and sorted(one.shape) != sorted((self._vocabulary, WIDTH)):
                self.largest = max(self.largest, one.numel())
        return result


def test_parts_without_gradients_are_not_computed():
    (hidden, weight, bias), labels = _problem()
    with _Counts(ROWS, VOCABULARY) as counts:
        deepspeed.ops.linear_cross_entropy(hidden, weight.detach(), labels, bias.detach()).backward()
    assert counts.products == pytest.approx(2)
    with _Counts(ROWS, VOCABULARY) as counts, torch.no_grad():
        deepspeed.ops.linear_cross_entropy(hidden, weight, labels, bias)
    assert counts.products == pytest.approx(1)


@pytest.mark.parametrize(("reduction", "products"), [("mean", 3), ("none", 4)])
def test_products_and_largest_tensor(reduction, products):
    rows, vocabulary = 64, 768
    tensors, labels = _problem(rows=rows, vocabulary=vocabulary)
    with _Counts(rows, vocabulary) as counts:
        deepspeed.ops.linear_cross_entropy(*tensors[:2], labels, reduction=reduction).sum().backward()
    assert counts.products == pytest.approx(products)
    assert counts.largest <= rows * WIDTH


def test_nothing_counted_gives_zero():
    tensors, labels = _problem(ignored=2.0)
    loss = deepspeed.ops.linear_cross_entropy(*tensors[:2], labels, tensors[2])
    assert loss == 0 and all(not gradient.any() for gradient in torch.autograd.grad(loss, tensors))


def test_num_items_shapes_and_autocast():
    tensors, labels = _problem()
    hidden, weight, bias = tensors
    expected = _plain(*tensors, labels, reduction="sum") / 50
    cut = {"labels": labels.view(1, ROWS), "bias": bias, "num_items_in_batch": torch.tensor(50)}
    found = deepspeed.ops.linear_cross_entropy(hidden.view(1, ROWS, WIDTH), weight, **cut)
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = deepspeed.ops.linear_cross_entropy(hidden.view(1, ROWS, WIDTH), weight, **cut)
        assert all(one.dtype == torch.float32 for one in torch.autograd.grad(found, tensors))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_refusals():
    (hidden, weight, bias), labels = _problem()
    loss = deepspeed.ops.linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for wrong in ({"reduction": "max"}, {"labels": labels[1:]}, {"bias": bias[1:]}, {"weight": weight.t()}):
        with pytest.raises(DeepSpeedConfigError, match="linear_cross_entropy"):
            deepspeed.ops.linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **wrong})
    with pytest.raises(IndexError, match="0 to 100"):
        deepspeed.ops.linear_cross_entropy(hidden, weight, labels + 90)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_vocabulary_over_ranks(reduction):
    """Parts of 40, 40 and 21 ids: losses and gradients of hidden states are whole on every rank."""
    from deepspeed.comm.transports.channel import Channel

    tensors, labels = _problem()
    expected = _plain(*tensors, labels, 2.0, reduction)
    gradients = _gradients(expected, tensors)

    def body(transport):
        low, high = 40 * transport.rank, min(40 * transport.rank + 40, VOCABULARY)
        own = [tensor.detach().clone().requires_grad_() for tensor in (tensors[0], *(t[low:high] for t in tensors[1:]))]
        how = {
            "reduction": reduction,
            "channel": Channel(transport),
            "low": low,
            "softcap": 2.0,
            "vocabulary": VOCABULARY,
        }
        loss = deepspeed.ops.linear_cross_entropy(own[0], own[1], labels, own[2], **how)
        return loss.detach(), _gradients(loss, own)

    results = run_threads(body, 3)
    for loss, (of_hidden, _, _) in results:
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(of_hidden, gradients[0], rtol=1e-5, atol=1e-5)
    for number in (1, 2):
        whole = torch.cat([of_own[number] for _, of_own in results])
        torch.testing.assert_close(whole, gradients[number], rtol=1e-5, atol=1e-5)


def test_distributions_over_ranks():
    """Log-probabilities of three ids a row, entropies and divergences: values and gradients of whole logits."""
    from deepspeed.comm.transports.channel import Channel

    torch.manual_seed(1)
    student, teacher = (torch.randn(ROWS, VOCABULARY, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        student[:, 7] = -torch.inf  # a masked token
        teacher[:, 7] = -torch.inf
    ids = torch.randint(8, VOCABULARY, (ROWS, 3))
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    possible = (log_t > -torch.inf).float()
    log_s, log_t = log_s.masked_fill(possible == 0, 0), log_t.masked_fill(possible == 0, 0)
    wholes = {
        "log_probs": (log_s.gather(-1, ids), [student]),
        "entropy": (-(log_s.exp() * possible * log_s).sum(-1), [student]),
        "divergence": ((log_t.exp() * possible * (log_t - log_s)).sum(-1), [student, teacher]),
    }

    def body(transport, name):
        channel, low = Channel(transport), 60 * transport.rank
        own = [t.detach()[:, low : low + 60].clone().requires_grad_() for t in (student, teacher)]
        found = {
            "log_probs": lambda: cut_log_probs(own[0], ids, channel, low),
            "entropy": lambda: cut_entropy(own[0], channel),
            "divergence": lambda: cut_divergence(own[1], own[0], channel),
        }[name]()
        return found.detach(), _gradients(found, own[: len(wholes[name][1])])

    for name, (whole, inputs) in wholes.items():
        results = run_threads(body, 2, name)
        for values, _ in results:
            torch.testing.assert_close(values, whole, rtol=1e-5, atol=1e-5)
        for number, gradient in enumerate(_gradients(whole, inputs)):
            found = torch.cat([gradients[number] for _, gradients in results], -1)
            torch.testing.assert_close(found, gradient.nan_to_num(0), rtol=1e-5, atol=1e-6)


def test_alone_a_cut_loss_is_that_of_torch():
    logits, labels = torch.randn(5, 9, requires_grad=True), torch.tensor([1, -100, 3, 8, 0])
    expected = functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cut_cross_entropy(logits, labels, None, 0, -100), expected)


@pytest.mark.parametrize("block_rows", [None, 1, 5, 1000])
def test_chunked_loss_of_logits(block_rows):
    torch.manual_seed(2)
    logits, labels = torch.randn(2, 11, 13, requires_grad=True), torch.randint(13, (2, 11))
    labels[0, :4] = -100
    loss = ChunkedCausalLMLoss(block_rows)
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    found = loss(logits, labels, 13)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits))
    by_items = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 40
    torch.testing.assert_close(loss(logits, None, 13, num_items_in_batch=40, shift_labels=labels), by_items)
    with pytest.raises(DeepSpeedConfigError, match="block_rows"):
        ChunkedCausalLMLoss(0)
    with pytest.raises(DeepSpeedConfigError, match="backend"):
        ChunkedCausalLMLoss(backend="cuda")
