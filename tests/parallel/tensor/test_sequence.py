"""Norms and residual sums on a part of the sequence: the same numbers, a part of the memory, the same bytes."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import NO_DROPOUT, causal_model, masked_model
from tests.harness.training import train_like
from tests.parallel.tensor.support import adamw, config, ids, llama, plain_run, short_loss_of
from tests.parallel.tensor.test_training import _check_weights, _whole_are_equal

LENGTH = 8


def _engine(model, size: int, stage: int, is_cut: bool = True, **sections):
    section = {"autotp_size": size, "sequence_parallel_norms": is_cut, **sections}
    return deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config(size, stage, tensor_parallel=section)
    )[0]


def _gpt2():
    return causal_model("GPT2", vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=6, **NO_DROPOUT)


def _bytes() -> int:
    return sum(tally.nbytes for (_, axis), tally in traffic.requested_along.items() if axis == "tensor")


def _held(engine, step: int) -> tuple[torch.Tensor, int, int, int]:
    """Loss; activations of whole and of half length that autograd keeps; bytes that traveled."""
    kept: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 3 and value.shape[0] == 2 and value.shape[2] == 24:
            kept[value.data_ptr()] = value.shape[1]
        return value

    before = _bytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = short_loss_of(engine, step, 0)
    engine.backward(loss)
    lengths = list(kept.values())
    return loss.detach(), lengths.count(LENGTH), lengths.count(LENGTH // 2), _bytes() - before


@on_ranks(4)
def test_the_same_numbers() -> None:
    size = 2
    stages = (1, 3)
    rank, data = dist.get_rank(), dist.get_world_size() // size
    for make in (llama, _gpt2):
        expected = plain_run(make(), 3, data, loss=short_loss_of)
        for stage in stages if make is llama else stages[:1]:
            model = make()
            if stage == 3:
                model.gradient_checkpointing_enable()
            engine = _engine(model, size, stage)
            train_like(engine, expected, short_loss_of, rank // size)
            _check_weights(engine, expected)
            if make is llama:
                _whole_are_equal(engine, size)
            with torch.no_grad():  # an evaluation of any length continues with whole activations
                logits = engine(input_ids=ids(0, rank // size, 9)).logits
            assert logits.shape == (2, 9, 67) and logits.isfinite().all()
            with pytest.raises(DeepSpeedConfigError, match="has 9 positions, which 2 ranks do not divide"):
                engine(input_ids=ids(0, rank // size, 9))
            engine.destroy()


def _counted():
    """What two more blocks add: whole activations, halves, bytes."""
    found = {}
    for is_cut in (False, True):
        for layers in (2, 4):
            engine = _engine(llama(num_hidden_layers=layers), 2, 0, is_cut)
            found[is_cut, layers] = _held(engine, 0)
            engine.destroy()
    torch.testing.assert_close(found[False, 4][0], found[True, 4][0], rtol=1e-5, atol=0.0)
    return {is_cut: [found[is_cut, 4][n] - found[is_cut, 2][n] for n in (1, 2, 3)] for is_cut in (False, True)}


def test_memory_and_bytes():
    found = run_ranks(_counted, 2)[0]
    (whole, no_half, nbytes), (left, halves, cut_nbytes) = found[False], found[True]
    # The inputs of attention and MLP, which cut layers need whole, stay; everything else is a half.
    assert no_half == 0 and left == 2 * 2 and halves == whole - left, found
    # Activations: as many bytes as before; gradients of 2 norms and 2 biases of 24 elements per block are all-reduced.
    assert cut_nbytes - nbytes == 2 * (2 + 2) * 24 * 4 * 2


@on_ranks(2)
def test_models_that_are_built_otherwise_are_refused() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 32}
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel_norms: the layers that feed .* are no module"):
        _engine(masked_model(vocab_size=67, **sizes), 2, 0)
    experts = {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(DeepSpeedConfigError, match="'model.layers.0.mlp.experts.*' is a stack of weights"):
        _engine(causal_model("Qwen3Moe", vocab_size=67, **sizes, **experts), 2, 0, verify=False)
