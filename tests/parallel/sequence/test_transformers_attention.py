"""Transformers models on shared sequences: what a model computes does not change, or it is refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.context import sharing_of
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence import mean_loss
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import masked_model
from tests.parallel.sequence.llama import llama, packed_batch, padded_batch, plain_batch
from tests.parallel.sequence.net import cut

pytestmark = needs_transformers

MODELS = {
    "llama": {},
    "one key head": {"heads": 7, "key_heads": 1},
    "window": {"kind": "Mistral", "sliding_window": 5},
    "two kinds of layers": {
        "kind": "Qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    },
    # Frequencies that depend on the length of the whole sequence, of which only the last ranks have the end.
    "dynamic rotary": {
        "max_position_embeddings": 10,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "long rotary": {
        "kind": "Phi3", "original_max_position_embeddings": 8, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0],
            "original_max_position_embeddings": 8,
        },
    },
    "attention without positions": {"kind": "Persimmon"},
    "windows in turn": {"kind": "Gemma3Text", "sliding_window": 5, "num_hidden_layers": 6},
}  # fmt: skip
BATCHES = {
    "plain": plain_batch,
    "packed": packed_batch,
    "padded": padded_batch,
    "padded on the left": lambda sample: padded_batch(sample, left=True),
}


def _loss(model, inputs):
    given = {name: value for name, value in inputs.items() if name != "shift_labels"}
    logits = model(**given, use_cache=False).logits
    labels = inputs["shift_labels"]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def _register(model, size, core="sdpa", **more):
    return UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=core, sequence_parallel_size=size, micro_batch_size=1, **more
    )


@on_ranks(2)
def test_position_ids_may_be_written_into_the_same_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = llama()
    plain = copy.deepcopy(model)
    _register(model, size)
    positions = None
    for batch in (packed_batch(3), plain_batch(3)):
        mine = cut(batch, rank, size)
        positions = mine["position_ids"].clone() if positions is None else positions.copy_(mine["position_ids"])
        with torch.no_grad():
            shown = cut({"losses": _loss(plain, batch).view(2, -1)}, rank, size)["losses"].flatten()
            found = _loss(model, {**mine, "position_ids": positions})
        torch.testing.assert_close(found, shown, rtol=1e-5, atol=1e-6)


CELLS = [("llama", "plain"), ("llama", "packed"), ("one key head", "padded on the left"), ("window", "packed")]
MORE_CELLS = [("dynamic rotary", "plain"), ("long rotary", "padded"), ("attention without positions", "packed")]


@pytest.mark.parametrize(
    ("ranks", "cells", "checkpointing"),
    [
        pytest.param(2, CELLS, False, id="two ranks"),
        pytest.param(2, MORE_CELLS, False, id="other rotary embeddings, and none"),
        pytest.param(4, [("one key head", "padded"), ("two kinds of layers", "packed")], False, id="four ranks"),
        pytest.param(2, CELLS[:2], True, id="recomputed"),
        *(
            pytest.param(
                ranks, [(model, batch) for model in MODELS for batch in BATCHES], False, marks=pytest.mark.slow
            )
            for ranks in (2, 4)
        ),
    ],
)
@on_ranks(timeout=300)
def test_a_shared_sequence_is_that_sequence(cells, checkpointing) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for model_name, batch_name in cells:
        whole = BATCHES[batch_name](3)
        expected, model = llama(**MODELS[model_name]), llama(**MODELS[model_name])
        reference = copy.deepcopy(model)
        labels = whole["shift_labels"]
        losses = _loss(expected, whole)
        (losses.sum() / (labels != -100).sum()).backward()
        mpu = _register(model, size, None if batch_name == "plain" else "sdpa")
        assert mpu.get_sequence_parallel_world_size() == size and mpu.get_sequence_parallel_rank() == rank
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": batch_name == "packed"})
        model.train()
        mine = cut(whole, rank, size)
        found = _loss(model, mine)
        shown = cut({"losses": losses.detach().view(2, -1)}, rank, size)["losses"].flatten()
        torch.testing.assert_close(found.detach(), shown, rtol=1e-5, atol=1e-6)
        mean_loss(found, mine["shift_labels"]).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            difference = (gradient / size - wanted.grad).norm() / wanted.grad.norm()
            assert difference < 1e-5, (model_name, batch_name, name, difference)
        # Another model of the process, made from the same configuration, is what it was.
        torch.testing.assert_close(_loss(reference, whole), losses.detach(), rtol=1e-6, atol=1e-6)
        # Any number of sequences; plain torch is asked again, as some frequencies depend on what else is in the batch.
        alone = _loss(expected, {name: value[:1] for name, value in whole.items()}).detach()
        shown = cut({"losses": alone[None]}, rank, size)["losses"].flatten()
        torch.testing.assert_close(
            _loss(model, {name: value[:1] for name, value in mine.items()}).detach(), shown, rtol=1e-5, atol=1e-5
        )


@on_ranks(2)
def test_parts_of_other_sizes_are_named() -> None:
    """Ranks that bring other lengths, or more sequences, are named on all ranks; gloo would have ended the process."""
    rank, model = dist.get_rank(), llama()
    _register(model, 2)
    for sizes, words in (
        ((1, 5 + 2 * rank), "rank 0: 1 sequences of 5 tokens, rank 1: 1 sequences of 7"),
        ((1 + rank, 6), "1: 2 sequences of 6"),
    ):
        ids = torch.ones(sizes, dtype=torch.int64)
        positions = (torch.arange(sizes[1]) + rank * sizes[1]).expand(sizes).contiguous()
        with pytest.raises(DeepSpeedConfigError, match=f"with parts of different shapes: .*{words}"):
            model(input_ids=ids, position_ids=positions, use_cache=False)


@on_ranks(2)
def test_evaluation_with_whole_sequences() -> None:
    """With disable_in_eval whole sequences are computed where they are, and generation works."""
    whole = padded_batch(1, left=True)
    expected, model = llama(), llama()
    _register(model, 2, disable_in_eval=True)
    model.eval()
    torch.testing.assert_close(_loss(model, whole), _loss(expected, whole))
    made = [m.generate(whole["input_ids"], attention_mask=whole["attention_mask"], max_new_tokens=4, do_sample=False)
            for m in (model, expected.eval())]  # fmt: skip
    assert torch.equal(*made)


def _packed_by_core(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """As the library's flash attention: documents are found in the position ids of one sequence only."""
    assert attention_mask is None and kwargs["is_causal"]
    length = query.size(2)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if query.size(0) == 1:
        numbers = (position_ids[0] == 0).cumsum(0)
        seen = seen & (numbers[:, None] == numbers)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@on_ranks(2)
def test_other_implementations_and_encoders() -> None:
    from transformers import AttentionInterface

    rank = dist.get_rank()
    # Several packed sequences by an implementation that finds documents in one.
    AttentionInterface.register("packs_one", _packed_by_core)
    whole, expected, model = packed_batch(3), llama(), llama()
    _register(model, 2, core="packs_one")
    wanted = cut({"losses": _loss(expected, whole).detach().view(2, -1)}, rank, 2)["losses"]
    torch.testing.assert_close(_loss(model, cut(whole, rank, 2)).detach(), wanted.flatten(), rtol=1e-5, atol=1e-6)
    # Attention in both directions, with padding.
    sizes = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    model = masked_model(
        seed=1, **sizes, intermediate_size=20, max_position_embeddings=16, attn_implementation="sdpa"
    ).eval()
    expected = copy.deepcopy(model)
    _register(model, 2)
    for make in (plain_batch, padded_batch):
        whole = {name: value for name, value in make(2).items() if name != "shift_labels"}
        seen = whole.get("attention_mask", torch.ones(2, 16))[..., None]
        wanted = cut({"logits": expected(**whole).logits * seen}, rank, 2)["logits"]
        found = model(**cut(whole, rank, 2)).logits * cut({"seen": seen}, rank, 2)["seen"]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    encoder = llama()
    encoder.config.is_encoder_decoder = True
    with pytest.raises(DeepSpeedConfigError, match="attends from one sequence to another"):
        _register(encoder, 2)


def _saved_activation_bytes():
    """Bytes that a layer keeps for backward on a rank."""
    layers = []
    rank, size = dist.get_rank(), dist.get_world_size()
    model = llama(8, 4, intermediate_size=112)
    if size > 1:
        _register(model, size)
    x = torch.randn(1, 64 // size, 32, requires_grad=True)
    places = torch.arange(rank * 64 // size, (rank + 1) * 64 // size)[None]
    angles = model.model.rotary_emb(x, places)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: layers.append(tensor) or tensor, lambda tensor: tensor
    ):
        model.model.layers[0](x, position_embeddings=angles, position_ids=places, attention_mask=None)
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in layers}
    return sum(nbytes for place, nbytes in found.items() if place not in own)


def test_activations_fall_with_the_number_of_ranks():
    kept = {size: max(run_ranks(_saved_activation_bytes, size)) for size in (1, 2, 4)}
    for size in (2, 4):
        assert kept[size] == pytest.approx(kept[1] / size, rel=0.05), kept


class Mamba(nn.Module):
    pass


@on_ranks(2)
def test_what_cannot_be_shared_is_refused() -> None:
    rank = dist.get_rank()
    model = llama()
    for arguments, words in (
        ({"core": "eager"}, '"eager" works on masks'),
        ({"core": "no_such"}, 'no attention implementation "no_such"'),
        ({"seq_length_is_variable": False}, "seq_length is missing"),
        ({"seq_length": 7}, "sequences of 7 tokens"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            _register(model, 2, **arguments)
    for change, words in (
        (lambda m: m.model.layers.append(Mamba()), "model.layers.2: Mamba"),
        (lambda m: m.model.layers.append(nn.Conv1d(3, 3, 4)), "Conv1d over 4 tokens"),
        (lambda m: setattr(m.config, "layer_types", ["full_attention", "linear_attention"]), "type linear_attention"),
    ):
        mixing = llama()
        change(mixing)
        with pytest.raises(DeepSpeedConfigError, match=words):
            _register(mixing, 2)
    with pytest.raises(DeepSpeedConfigError, match="expected a Transformers model"):
        wrong = nn.Linear(1, 1)
        wrong.config = None
        _register(wrong, 2)
    assert _register(model, 1) is None and model.config._attn_implementation == "sdpa"
    _register(model, 2)
    mine = cut(plain_batch(1), rank, 2)
    with pytest.raises(DeepSpeedConfigError, match="without position_ids"):
        model(input_ids=mine["input_ids"])
    with pytest.raises(DeepSpeedConfigError, match="Model was called without position_ids"):
        model.model(input_ids=mine["input_ids"])
    with pytest.raises(DeepSpeedConfigError, match="with labels and without shift_labels"):
        model(input_ids=mine["input_ids"], position_ids=mine["position_ids"], labels=mine["input_ids"])
    with pytest.raises(DeepSpeedConfigError, match="attention_mask is a 4-D tensor"):
        model(input_ids=mine["input_ids"], position_ids=mine["position_ids"], attention_mask=torch.ones(2, 1, 8, 8))
    with pytest.raises(DeepSpeedConfigError, match="attention_mask is of 16 tokens, but this rank has 8"):
        model(input_ids=mine["input_ids"], position_ids=mine["position_ids"], attention_mask=torch.ones(2, 16))
    from transformers.masking_utils import chunked_causal_mask_function

    from deepspeed.parallel.sequence.transformers_attention import visible_by

    with pytest.raises(DeepSpeedConfigError, match="masks attention by chunked_overlay"):
        visible_by(chunked_causal_mask_function(4, torch.zeros(2)))
    with pytest.raises(DeepSpeedConfigError, match="a copy of one that was"):
        copy.deepcopy(model)(input_ids=mine["input_ids"], position_ids=mine["position_ids"])


class Inside(nn.Module):
    """A program's own module around Transformers models."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs):
        return self.models[0](**inputs)


@on_ranks(2)
def test_no_attention_is_left_to_this_ranks_tokens_in_silence() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}
    for model, words in (
        (Inside(llama(), llama()), r"holds 2 Transformers models \('models.0', 'models.1'\); name the"),
        (nn.Sequential(*llama().model.layers), r"'0.self_attn' \(LlamaAttention\) .* no part of one of its models"),
        (
            PipelineModule(list(llama().model.layers), num_stages=1),
            r"'0.self_attn' \(LlamaAttention\) .* in stages by PipelineModule.from_transformers",
        ),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, config=config)


@on_ranks(4)
def test_by_configuration_alone() -> None:
    """By configuration alone, in every mode, the gradients are those of whole sequences."""
    cells = [("ulysses", 3, 4, 2, "packed"), ("both", 1, 4, 2, "packed"), ("ring", 2, 1, 1, "padded")]
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (mode, stage, heads, key_heads, make) in enumerate(cells):
        whole, expected, model = BATCHES[make](3), llama(heads, key_heads), llama(heads, key_heads)
        if number == 0:  # inside a module of one's own
            expected, model = Inside(expected), Inside(model)
        labels = whole["shift_labels"]
        (_loss(expected, whole).sum() / (labels != -100).sum()).backward()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "sequence_parallel_size": size,
            "sequence_parallel": {"mode": mode},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        mine = cut(whole, rank, size)
        engine.backward(mean_loss(_loss(engine, mine), mine["shift_labels"]))
        wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
        for name, gradient in engine.iter_full("grad"):
            difference = (gradient - wanted[name]).norm() / wanted[name].norm()
            assert difference < 1e-5, (mode, name, difference)
        engine.step()
        engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match='mode "ring": Linear is no Transformers model'):
        deepspeed.initialize(model=nn.Linear(2, 2), config={**config, "sequence_parallel": {"mode": "ring"}})


@pytest.mark.parametrize("size", [0, -2])
def test_a_number_of_ranks_below_one_is_refused(size):
    with pytest.raises(DeepSpeedConfigError, match=rf"sequence_parallel_size={size}\): expected the number of ranks"):
        _register(nn.Linear(2, 2), size)


@on_ranks(2)
def test_models_registered_by_name_keep_their_settings(tmp_path) -> None:
    """Two models registered with different settings, in the order in which engines take them."""
    folder = str(tmp_path)
    order = ["first", "second"]
    rank = dist.get_rank()
    names = {}
    for number, name in enumerate(("first", "second")):
        names[name] = f"{folder}/{name}"
        if rank == 0:
            llama(num_hidden_layers=1 + number).save_pretrained(names[name])
    dist.barrier()
    from transformers import AutoModelForCausalLM

    for name, disable in (("first", True), ("second", False)):
        UlyssesSPAttentionHF.register_with_transformers(
            names[name], core_attn_implementation="sdpa", sequence_parallel_size=2, disable_in_eval=disable
        )
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    with pytest.raises(DeepSpeedConfigError, match=r"initialize\(model=<LlamaForCausalLM>\): .*/first', .*/second'"):
        deepspeed.initialize(model=llama(), config=config)
    for name in order:
        model = AutoModelForCausalLM.from_pretrained(names[name])
        deepspeed.initialize(model=model, config=config)[0].destroy()
        assert sharing_of(model).disable_in_eval == (name == "first")


def test_positions_with_several_axes_are_refused():
    from deepspeed.parallel.sequence.transformers_attention import _checked_positions

    places, module = torch.zeros(1, 6).long(), nn.Identity()
    assert _checked_positions(None, module) is None and _checked_positions(places, module) is places
    with pytest.raises(DeepSpeedConfigError, match=r"Identity got position_ids of shape \(3, 1, 6\); expected \[batch"):
        _checked_positions(places.expand(3, 1, 6), module)
