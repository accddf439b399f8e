"""Tile by tile is the whole: values, gradients, later factors, what is masked; and how much is there at once."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.feature import offload_checkpoints, tile_model
from deepspeed.parallel.sequence.tiled import tile_lengths
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from deepspeed.sequence import chunked_cross_entropy
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rise, self.fall, self.head = nn.Linear(5, 11), nn.Linear(11, 5), nn.Linear(5, 13, bias=False)

    def forward(self, x):
        return self.fall(functional.gelu(self.rise(x)))


def _loss_of(module, x, y):
    return functional.cross_entropy(module.head(x).flatten(0, -2), y.flatten())


def _labels():
    y = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(2))
    y[0, 3:5] = -100
    y[:, 6] = -100  # of seven tiles the last has nothing that counts
    return y


def _gradients(value, module, x):
    found = torch.autograd.grad(value * 0.25, [x, *module.parameters()], allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("params", [None, []])
def test_tiles_are_the_whole(tiles, params):
    module, y = Mlp(), _labels()
    x = torch.randn(2, 7, 5, requires_grad=True)
    for found, expected in (
        (TiledMLP.apply(Mlp.forward, module, x, tiles, params).sin().sum(), module(x).sin().sum()),
        (TiledFusedLogitsLoss.apply(_loss_of, module, x, y, None, tiles, params, "mean"), _loss_of(module, x, y)),
        (
            sequence_tiled_compute(
                lambda x, y, scale: module(x) * scale, 7, tiles, {"x": x, "y": None}, {"scale": 2.0}, "x", params
            ).sum(),
            (module(x) * 2).sum(),
        ),
        (
            SequenceTiledCompute.apply(
                lambda x: module(x).mean(), 7, tiles, ["x"], [], "x", params, None, "mean", x
            ),
            module(x).mean(),
        ),
        (chunked_cross_entropy(x, module.head, y, tile_tokens=tiles), _loss_of(module, x, y)),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)
        for one, other in zip(_gradients(found, module, x), _gradients(expected, module, x), strict=True):
            torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(TiledMLP.apply(Mlp.forward, module, x, tiles, None), module(x))


def test_masks_and_sums():
    module, y = Mlp(), _labels()
    x = torch.randn(2, 7, 5, requires_grad=True)
    mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    teacher = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(4))
    for reduction in ("mean", "sum"):

        def loss(module, x, y, mask, reduction=reduction):
            wanted = y.masked_fill(mask == 0, -100)
            return functional.cross_entropy(module.head(x).view(-1, 13), wanted.view(-1), reduction=reduction)

        def distance(module, x, y, mask, reduction=reduction):
            apart = (module.head(x) - module.head(y)).square().mean(-1) * mask
            return getattr(apart, reduction)()

        # What a function gets can be viewed as rows, also of several sequences.
        for fn, wanted, given in itertools.product((loss, distance), (y, teacher), (mask, mask.long())):
            if (fn is loss) == (wanted is y):
                for tiles in (1, 3, 14, 20):
                    found = TiledFusedLogitsLoss.apply(fn, module, x, wanted, given, tiles, None, reduction)
                    expected = fn(module, x, wanted, given)
                    torch.testing.assert_close(found, expected)
                    for one, other in zip(_gradients(found, module, x), _gradients(expected, module, x), strict=True):
                        torch.testing.assert_close(one, other)
    assert tile_lengths(9, 4) == [3, 2, 2, 2] and tile_lengths(8, 4) == [2] * 4 and tile_lengths(3, 4) == [1] * 3
    nothing = torch.full_like(y, -100)
    assert TiledFusedLogitsLoss.apply(_loss_of, module, x, nothing, None, 3).item() == 0.0
    assert chunked_cross_entropy(x, module.head, nothing).item() == 0.0
    for arguments, words in (
        ((lambda x: x, 8, 2, {"x": x}, {}, "x"), "x has 7 tokens along axis 1, and seqlen is 8"),
        ((lambda x: x, 7, 2, {"x": x}, {}, "z"), "grad_requiring_tensor_key 'z' is none"),
        ((lambda x: x, 7, 0, {"x": x}, {}, "x"), "at least 1 tile"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            sequence_tiled_compute(*arguments)


@on_ranks(2)
def test_a_rank_may_have_only_padding_of_the_vocabulary() -> None:
    rank = dist.get_rank()
    logits = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(0))
    logits[..., 4:] = -torch.inf  # padding of the vocabulary, all that rank 1 has
    target = torch.tensor([[0], [3], [1]])
    alone = [dist.new_group([each]) for each in range(2)][rank]
    mine, whole = logits.chunk(2, -1)[rank].clone().requires_grad_(), logits.requires_grad_()
    found = vocab_sequence_parallel_cross_entropy(mine, target, alone, tp_group=dist.group.WORLD)
    expected = functional.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(found.flatten(), expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, -1)[rank])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_divides_by_what_counts_has_gradients_where_a_tile_has_nothing(reduction):
    module, x = Mlp(), torch.randn(2, 7, 5, requires_grad=True)
    y, mask = _labels().clamp(min=0), torch.ones(2, 7)
    mask[0], mask[1, 2] = 0, 0

    def loss(module, x, y, mask):
        each = functional.cross_entropy(module.head(x).view(-1, 13), y.view(-1), reduction="none") * mask.view(-1)
        return each.sum() / mask.sum() if reduction == "mean" else each.sum() / mask.sum() * mask.sum()

    found = TiledFusedLogitsLoss.apply(loss, module, x, y, mask, 14, None, reduction)
    expected = loss(module, x, y, mask)
    torch.testing.assert_close(found, expected)
    for one, other in zip(_gradients(found, module, x), _gradients(expected, module, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Beside fp32: values are as near as without tiles; so are gradients of weights under autocast, summed in fp32."""
    tokens, tiles = 256, 64
    y = torch.randint(0, 13, (2, tokens), generator=torch.Generator().manual_seed(2))
    y[0, :40] = -100
    start = torch.randn(2, tokens, 5, generator=torch.Generator().manual_seed(3))

    def ways(module, x, is_tiled):
        if not is_tiled:
            return module(x).float().sin().sum(), _loss_of(module, x, y), _loss_of(module, x, y)
        return (
            TiledMLP.apply(Mlp.forward, module, x, tiles).float().sin().sum(),
            TiledFusedLogitsLoss.apply(_loss_of, module, x, y, None, tiles),
            chunked_cross_entropy(x, module.head, y, tile_tokens=2 * tokens // tiles),
        )

    exact = Mlp()
    wanted = []
    for number in range(3):
        x = start.clone().requires_grad_()
        value = ways(exact, x, False)[number]
        wanted.append((value, _gradients(value, exact, x)))
    for casts, number in itertools.product((True, False), range(3)):
        apart = {}
        for is_tiled in (False, True):
            module, x = Mlp(), start.clone()
            if not casts:
                module, x = module.to(dtype), x.to(dtype)
            x.requires_grad_()
            with torch.autocast("cpu", dtype, enabled=casts):
                value = ways(module, x, is_tiled)[number]
            torch.testing.assert_close(value.float(), wanted[number][0], rtol=2e-2, atol=2e-2)
            apart[is_tiled] = [
                ((one.float() - other).norm() / other.norm()).item()
                for one, other in zip(_gradients(value, module, x), wanted[number][1], strict=True)
            ]
        for near, far in zip(apart[True], apart[False], strict=True):
            # Gradients of weights that are half themselves are summed in that dtype: errors add up as at random.
            more = 0.3 * far + 1e-5 if casts else torch.finfo(dtype).eps * tiles**0.5
            assert near <= far + more, (casts, number, apart)


class Largest(TorchDispatchMode):
    """The largest tensor with a vocabulary for its last axis that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:  # the head's weights
            return out
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.size(-1) == 13:
                self.rows = max(self.rows, tensor.numel() // 13)
        return out


def test_logits_exist_for_one_tile_at_a_time():
    module, x = Mlp(), torch.randn(4, 10, 5, requires_grad=True)
    y = torch.randint(0, 13, (4, 10))
    with Largest() as seen:
        chunked_cross_entropy(x, module.head, y, tile_tokens=8).backward()
    assert seen.rows == 8
    with Largest() as seen:
        TiledFusedLogitsLoss.apply(_loss_of, module, x, y, None, 5).backward()
    assert seen.rows == 8


@on_ranks(2)
def test_a_vocabulary_that_is_cut() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(6, 2, 8, generator=generator).requires_grad_()
    target = torch.randint(0, 8, (6, 2), generator=generator)
    target[4] = -100
    expected = functional.cross_entropy(whole.permute(0, 2, 1), target, reduction="none")
    weight = torch.randn(6, 2, generator=generator)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), whole)
    tokens = slice(rank * 3, rank * 3 + 3)
    for own_share in (False, True):
        mine = whole.detach()[tokens].clone().requires_grad_()
        found = vocab_sequence_parallel_cross_entropy(mine, target[tokens], dist.group.WORLD, own_share=own_share)
        torch.testing.assert_close(found, expected.detach())
        (found * weight).sum().backward()
        torch.testing.assert_close(mine.grad, gradient[tokens] * (1 if own_share else size))
    words = slice(rank * 4, rank * 4 + 4)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    mine = whole.detach()[..., words].clone().requires_grad_()
    found = vocab_sequence_parallel_cross_entropy(mine, target, alone, dist.group.WORLD, reduction="mean")
    torch.testing.assert_close(found, functional.cross_entropy(whole.permute(0, 2, 1), target).detach())
    found.backward()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(whole.permute(0, 2, 1), target), whole)
    torch.testing.assert_close(mine.grad, gradient[..., words])
    with pytest.raises(DeepSpeedConfigError, match="the vocabulary entries 4 to 9 are 5, but the logits have 4"):
        vocab_sequence_parallel_cross_entropy(mine, target, alone, None, 4, 9)


@needs_transformers
@on_ranks(2)
def test_ranks_with_different_numbers_of_tiles() -> None:
    """Ranks with different lengths, so different numbers of tiles: the head is gathered as often on all."""
    from tests.parallel.sequence.llama import llama

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "sequence_parallel": {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 2},
    }
    model, whole = llama(), llama()
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    losses = []
    for rank in range(2):
        ids = torch.arange(1, 6 + 7 * rank)[None]
        labels = ids if rank else torch.full_like(ids, -100)  # on one rank nothing counts
        losses.append(whole(input_ids=ids, labels=labels).loss if rank else whole(input_ids=ids).logits.sum() * 0)
        if rank == dist.get_rank():
            out = engine(input_ids=ids, labels=labels)
            torch.testing.assert_close(out.loss, losses[rank])
            engine.backward(out.loss)
    (sum(losses) / 2).backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, gradient in engine.iter_full("grad"):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    engine.step()


@needs_transformers
@pytest.mark.parametrize(("stage", "cuts_vocabulary"), [(2, False), (3, False), (1, True)])
@on_ranks(2)
def test_by_configuration(stage, cuts_vocabulary) -> None:
    """The same losses and parameters as without tiles; the Trainer's and Accelerate's inputs are the same."""
    from tests.parallel.sequence.llama import llama, plain_batch

    found = {}
    tensor = {"autotp_size": 2, "vocab_parallel_lm_head": True, "verify": False}
    more = {"tensor_parallel": tensor} if cuts_vocabulary else {}
    data = 0 if cuts_vocabulary else dist.get_rank()
    words = 23 if not cuts_vocabulary else (12, 11)[dist.get_rank()]
    for tiled in (False, True):
        model = llama()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "sequence_parallel": {"tiled_mlp": tiled, "tiled_loss": tiled, "tile_tokens": 5},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-5}},
            **more,
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        losses = []
        for step in range(2):
            batch = plain_batch(data, step)
            out = engine(**batch, labels=batch["shift_labels"], use_cache=False)
            assert (out.logits is None) == tiled
            engine.backward(out.loss)
            engine.step()
            losses.append(out.loss.item())
        engine.eval()
        assert engine(input_ids=batch["input_ids"]).logits.shape == (2, 16, words)
        found[tiled] = losses, dict(engine.iter_full("fp32"))
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    for name, value in found[True][1].items():
        torch.testing.assert_close(value, found[False][1][name], rtol=1e-5, atol=1e-6)


@needs_transformers
@on_ranks(1)
def test_checkpoints_on_the_host() -> None:
    """Only the layers' inputs go to the host, and come back for backward; also after checkpointing is set anew."""
    from deepspeed.offload import activations
    from tests.parallel.sequence.llama import llama, plain_batch

    moved, fetched, move = [], [], activations._SavedBlock.pack
    activations._SavedBlock.pack = lambda self, tensor: moved.append(tensor.shape) or move(self, tensor)
    back = activations._unpack
    activations._unpack = lambda packed: fetched.append(packed.shape) or back(packed)
    try:
        found = {}
        for offload in (False, True):
            model = llama()
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "sequence_parallel": {"offload_checkpoints": offload},
            }
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            for step, reentrant in enumerate((None, False, True)):
                if offload and reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                batch = plain_batch(dist.get_rank(), step)
                engine.backward(engine(**batch, labels=batch["input_ids"], use_cache=False).loss)
                engine.step()
            found[offload] = dict(engine.iter_full("fp32"))
        assert [shape for shape in moved if len(shape) > 1] == [(2, 16, 16)] * 6  # two layers, three steps
        assert fetched.count((2, 16, 16)) == 6
    finally:
        activations._SavedBlock.pack, activations._unpack = move, back
    for name, value in found[True].items():
        torch.testing.assert_close(value, found[False][name], rtol=1e-5, atol=1e-6)


class _MLP(nn.Linear):
    """An MLP by its name, with one input."""


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_tiled_mlp_takes_any_number_of_tokens(tokens):
    model = nn.Sequential(_MLP(4, 3))
    x = torch.randn(tokens, 4)
    expected = model(x)
    tile_model(model, mlp=True, loss=False, tokens=2)
    torch.testing.assert_close(model(x), expected)


def test_models_that_cannot_be_tiled_are_refused():
    with pytest.raises(DeepSpeedConfigError, match="offload_checkpoints: Linear is no Transformers model"):
        offload_checkpoints(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel.tiled_mlp: Linear has no module"):
        tile_model(nn.Linear(2, 2), mlp=True, loss=False, tokens=1)
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel.tiled_loss: Linear is no causal language model"):
        tile_model(nn.Linear(2, 2), mlp=False, loss=True, tokens=1)
