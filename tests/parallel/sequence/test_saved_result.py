"""Attention's result is kept once: the same gradients to the bit, and a rank keeps its part of what one rank keeps."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.parallel.sequence.attention import DistributedAttention
from deepspeed.parallel.sequence.saved_result import SavedResult
from deepspeed.sequence import mean_loss
from tests.ecosystem.support import needs_transformers
from tests.engine.support import SHARDED
from tests.harness import on_ranks, run_ranks
from tests.parallel.sequence.llama import llama, packed_batch, plain_batch
from tests.parallel.sequence.net import Block, attend, cut

TOKENS = 256


class Alive(TorchDispatchMode):
    """Bytes of the memory that operations made and that is still in use, whoever holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # What cannot be resized is not torch's: pages that ranks share, which are there once for all layers.
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        return out

    def nbytes(self) -> int:
        gc.collect()
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def _block(once):
    torch.manual_seed(1)
    block = Block(4, 4, dist.group.WORLD if dist.get_world_size() > 1 else None)
    if once:
        block.shared = DistributedAttention(attend, dist.group.WORLD, recompute_exchange=True)
    return block


def _passes(once):
    """Bytes that a block and its input keep for backward, bytes that backward sends, and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block = _block(once)
    whole = torch.randn(1, TOKENS, 12, generator=torch.Generator().manual_seed(3))
    x = whole[:, rank * TOKENS // size : (rank + 1) * TOKENS // size].clone().requires_grad_()
    with Alive() as alive:  # which sees the input and the weights too, as operations return views of them
        out = block(x).sum()
    weights = sum(parameter.nbytes for parameter in block.parameters() if parameter.dim() > 1)
    kept = alive.nbytes() - out.nbytes - weights
    with counted() as traffic:
        out.backward()
        sent = traffic.requested_along["all_to_all", "sequence"].nbytes if size > 1 else 0
    return kept, sent, [x.grad, *(parameter.grad for parameter in block.parameters())]


def test_a_rank_keeps_its_part():
    whole = run_ranks(_passes, 1, False)[0][0]
    for size in (2, 4):
        (twice, sent, gradients), (once, resent, same) = (run_ranks(_passes, size, way)[0] for way in (False, True))
        assert twice / whole * size == pytest.approx(1 + 16 / 126, rel=0.005)
        assert once / whole * size == pytest.approx(1, rel=0.005)
        assert resent == sent * 5 // 4  # five tensors in the place of four
        for one, other in zip(gradients, same, strict=True):
            assert torch.equal(one, other)


@on_ranks(2)
def test_a_result_that_is_changed() -> None:
    layer = DistributedAttention(attend, dist.group.WORLD, recompute_exchange=True)
    parts = [torch.randn(1, 4, 2, 3, requires_grad=True) for _ in range(3)]
    with pytest.raises(CallOrderError, match="recompute_exchange: attention's result was changed in place"):
        layer(*parts, 0).mul_(2).sum().backward()
    DistributedAttention(attend, dist.group.WORLD)(*parts, 0).mul_(2).sum().backward()
    # What attention itself has changed in place is kept as it is.
    scaled = DistributedAttention(lambda q, k, v: attend(q, k, v).clone().mul_(2), None, recompute_exchange=True)
    for part in parts:
        part.grad = None
    scaled(*parts, 0).sum().backward()
    wanted = [part.grad for part in parts]
    for part in parts:
        part.grad = None
    (2 * DistributedAttention(attend, None)(*parts, 0)).sum().backward()
    for part, gradient in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part.grad, gradient)


def _loss(model, inputs):
    given = {name: value for name, value in inputs.items() if name != "shift_labels"}
    logits = model(**given, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="none")


@needs_transformers
@on_ranks(2)
def test_by_configuration() -> None:
    """Sharded parameters' own hooks go on; checkpointed layers are left to checkpointing; documents are kept twice."""
    rank, sent = dist.get_rank(), {}
    for checkpoints in (False, True):
        for make in (plain_batch, packed_batch):
            gradients = {}
            for once in (False, True):
                model = llama()
                if checkpoints:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                config = {
                    "train_micro_batch_size_per_gpu": 2,
                    "sequence_parallel_size": 2,
                    "sequence_parallel": {"recompute_exchange": once},
                    "zero_optimization": {"stage": 3, **SHARDED},
                }
                engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
                mine = cut(make(3), rank, 2)
                with counted() as traffic:
                    engine.backward(mean_loss(_loss(engine, mine), mine["shift_labels"]))
                    sent[checkpoints, make, once] = traffic.requested_along["all_to_all", "sequence"].nbytes
                gradients[once] = dict(engine.iter_full("grad"))
                engine.destroy()
            for name, gradient in gradients[True].items():
                assert torch.equal(gradient, gradients[False][name]), (checkpoints, make, name)
    result = 2 * 2 * 8 * 16 * 4 // 2  # two layers' results, half of which move
    assert sent[False, plain_batch, True] - sent[False, plain_batch, False] == result
    for checkpoints, make in ((True, plain_batch), (False, packed_batch)):
        assert sent[checkpoints, make, True] == sent[checkpoints, make, False]
    for section, words in (({"mode": "ring"}, 'with mode "ring"'), ({}, "Linear is no Transformers model; give its")):
        section = {"recompute_exchange": True, **section}
        model = torch.nn.Linear(2, 2) if "mode" not in section else llama()
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, config={**config, "sequence_parallel": section})


def test_an_operation_within_attention_that_saves_its_own_result_is_not_kept_by_it():
    kept, x = SavedResult(), torch.ones(3, requires_grad=True)
    with kept.attending():
        weights = torch.tanh(x)
        result = weights.sum(0, keepdim=True)
    kept.became(result, result.clone(), lambda by_tokens: by_tokens)
    gone = weakref.ref(weights)
    del kept, weights, result
    gc.collect()
    assert gone() is None
