"""Sparse attention in Transformers models: equal to the model where the pattern is dense; training by configuration."""

import pytest
import torch

import deepspeed
from tests.ecosystem.support import needs_transformers
from tests.harness import run_ranks

pytestmark = needs_transformers

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 97}
LLAMA_LIKE = {**SMALL, "num_key_value_heads": 2}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _make(name, kind="ForCausalLM", **settings):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}{kind}")(config).eval()


MODELS = {
    "bert": lambda: _make("Bert", "ForMaskedLM", **SMALL, **PLAIN, max_position_embeddings=64),
    "llama": lambda: _make("Llama", **LLAMA_LIKE),
    "sliding window": lambda: _make("Mistral", **LLAMA_LIKE, sliding_window=16),
    "gpt2": lambda: _make(
        "GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64, bos_token_id=1,
        eos_token_id=1,
    ),
}  # fmt: skip


def _tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 97, (2, 50), generator=generator)


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_a_dense_pattern_changes_nothing_padding_included(model):
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    sparse, plain = MODELS[model](), MODELS[model]()
    use_sparse_attention(sparse, DenseSparsityConfig(4, 8))
    tokens = _tokens()
    right = torch.ones_like(tokens)
    right[0, 30:] = 0
    for mask in (None, right, right.flip(1)):
        kept = torch.ones_like(tokens).bool() if mask is None else mask.bool()
        difference = sparse(tokens, attention_mask=mask).logits - plain(tokens, attention_mask=mask).logits
        assert difference[kept].abs().max() < 1e-6


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    sparse, plain = MODELS["llama"](), MODELS["llama"]()
    use_sparse_attention(sparse, DenseSparsityConfig(4, 8))
    positions = torch.cat([torch.arange(20), torch.arange(30)]).expand(2, -1)
    given = {"input_ids": _tokens(), "position_ids": positions, "use_cache": False}
    assert (sparse(**given).logits - plain(**given).logits).abs().max() < 1e-6
    unpacked = plain(_tokens(), use_cache=False).logits
    assert (sparse(**given).logits - unpacked).abs().max() > 1e-3


@torch.no_grad()
def test_generation_with_a_cache_sees_what_the_whole_sequence_would():
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, use_sparse_attention

    model = MODELS["llama"]()
    tokens = _tokens()
    dense = model(tokens).logits
    use_sparse_attention(model, FixedSparsityConfig(4, 4, num_local_blocks=2, attention="unidirectional"))
    whole = model(tokens).logits
    assert (whole - dense).abs().max() > 1e-3
    first = model(tokens[:, :40], use_cache=True)
    steps, cache = [first.logits], first.past_key_values
    for place in range(40, 50):
        steps.append(model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True).logits)
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-6


@pytest.mark.parametrize("model", ["llama", "sliding window"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_every_cache_is_that_without(model, cache):
    from deepspeed.ops.sparse_attention import BSLongformerSparsityConfig, use_sparse_attention

    sparse = MODELS[model]()
    use_sparse_attention(sparse, BSLongformerSparsityConfig(4, 4, attention="unidirectional"))
    sparse.generation_config.eos_token_id = None
    tokens = _tokens()[:, :9]
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    for given, mask in ((tokens, None), (tokens, padding), (tokens[:, :1], None)):
        wanted = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        found = sparse.generate(given, cache_implementation=cache, **wanted)
        assert torch.equal(found, sparse.generate(given, use_cache=False, **wanted))


@torch.no_grad()
def test_masks_that_broadcast_over_queries():
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    sparse, plain = MODELS["llama"](), MODELS["llama"]()
    use_sparse_attention(sparse, DenseSparsityConfig(4, 8))
    mask = torch.zeros(2, 1, 1, 50)
    mask[0, ..., 30:] = torch.finfo(torch.float32).min
    given = {"input_ids": _tokens(), "attention_mask": mask}
    assert (sparse(**given).logits - plain(**given).logits).abs().max() < 1e-6


def test_a_second_model_of_the_same_configuration_stays_as_it_is():
    import transformers

    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    config = transformers.LlamaConfig(**LLAMA_LIKE)
    sparse, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    use_sparse_attention(sparse, DenseSparsityConfig(4, 8))
    assert other.config._attn_implementation == config._attn_implementation == "sdpa"
    other(_tokens())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _make("T5", "ForConditionalGeneration", d_model=32, num_layers=1, num_heads=4), "self-attention only"),
        (lambda: _make("Bloom", n_layer=1, hidden_size=32, n_head=4, vocab_size=97), "AttentionInterface"),
        (lambda: _make("Llama", **{**LLAMA_LIKE, "num_attention_heads": 8}), "num_heads=8"),
        (lambda: torch.nn.Linear(3, 3), "expected a Transformers model"),
    ],
)
def test_models_that_cannot_be_switched_are_refused_by_name(make, words):
    from deepspeed.errors import DeepSpeedConfigError
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    with pytest.raises(DeepSpeedConfigError, match=words):
        use_sparse_attention(make(), DenseSparsityConfig(4, 8))


def test_a_model_whose_scores_are_capped_is_refused_when_it_runs():
    from deepspeed.errors import DeepSpeedConfigError
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, use_sparse_attention

    model = _make("Gemma2", **LLAMA_LIKE, head_dim=8)
    use_sparse_attention(model, DenseSparsityConfig(4, 8))
    with pytest.raises(DeepSpeedConfigError, match="softcap"):
        model(_tokens())


@torch.no_grad()
def test_longer_position_tables():
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseAttentionUtils

    model = MODELS["bert"]()
    former = model.bert.embeddings.position_embeddings.weight.clone()
    config = FixedSparsityConfig(4, 4)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 150, config)
    table = model.bert.embeddings.position_embeddings.weight
    assert torch.equal(table, former.repeat(3, 1)[:150]) and model.config.max_position_embeddings == 150
    tokens = torch.randint(0, 97, (1, 149))
    assert model(tokens).logits.isfinite().all()
    roberta = _make("Roberta", "ForMaskedLM", **SMALL, **PLAIN, max_position_embeddings=34)
    former = roberta.roberta.embeddings.position_embeddings.weight.clone()
    SparseAttentionUtils.extend_position_embedding(roberta, 70)
    table = roberta.roberta.embeddings.position_embeddings.weight
    assert torch.equal(table, torch.cat([former, former[2:], former[2:8]]))
    assert roberta(tokens[:, :70]).logits.isfinite().all()
    roberta = _make("Roberta", "ForMaskedLM", **SMALL, **PLAIN, max_position_embeddings=34)  # 32 positions
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(roberta, 33, config)
    assert roberta(tokens[:, :33]).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_exchanged_layers_of_a_decoder_hide_later_tokens(attention):
    from deepspeed.ops.sparse_attention import DenseSparsityConfig, SparseAttentionUtils

    model = _make("Bert", "LMHeadModel", **SMALL, **PLAIN, is_decoder=True, attn_implementation=attention)
    tokens = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 20:] = 0
    wanted = [model(tokens, attention_mask=each, use_cache=False).logits for each in (None, mask)]
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, model.bert.encoder.layer, DenseSparsityConfig(4, 8)
    )
    found = [model(tokens, attention_mask=each, use_cache=False).logits for each in (None, mask)]
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1][mask.bool()], wanted[1][mask.bool()])


@torch.no_grad()
def test_exchanged_layers_and_padding_to_blocks():
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseAttentionUtils, use_sparse_attention

    exchanged, switched = MODELS["bert"](), MODELS["bert"]()
    pattern = FixedSparsityConfig(4, 8, num_local_blocks=2)
    layers = exchanged.bert.encoder.layer
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        exchanged.config, layers, pattern
    )
    use_sparse_attention(switched, pattern)
    tokens = torch.randint(0, 97, (2, 58), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 30:] = 0
    padding, ids, longer, *_ = SparseAttentionUtils.pad_to_block_size(8, tokens, mask, None, None, None, 0, None)
    assert (padding, ids.shape, longer[1].tolist()) == (6, (2, 64), [1] * 58 + [0] * 6)
    found = SparseAttentionUtils.unpad_sequence_output(padding, exchanged(ids, attention_mask=longer).logits)
    wanted = switched(tokens, attention_mask=mask).logits
    assert (found - wanted)[mask.bool()].abs().max() < 1e-6
    additive = torch.zeros(2, 1, 1, 58)
    least = SparseAttentionUtils.pad_to_block_size(8, tokens, additive, None, None, None, 0, None)[2]
    assert (least[..., 58:] == torch.finfo(torch.float32).min).all() and (least[..., :58] == 0).all()
    positions = torch.arange(58).expand(2, -1)
    embedded = torch.zeros(2, 58, 3)
    made = SparseAttentionUtils.pad_to_block_size(
        8, None, None, positions, positions, embedded, 5, lambda ids: ids.unsqueeze(2).expand(-1, -1, 3)
    )
    assert made[1] is None and made[2].sum() == 116 and made[3][0, 58:].sum() == 0
    assert made[4][0].tolist() == list(range(64)) and (made[5][:, 58:] == 5).all()


def _trained(stage, steps, length, pattern):
    """Losses and weights of a BERT that initialize made sparse."""
    torch.manual_seed(0)
    model = _make("Bert", "ForMaskedLM", **SMALL, **PLAIN, max_position_embeddings=length).train()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if pattern is not None:
        config["sparse_attention"] = {"apply_to": "model", **pattern}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(1))
    mine = tokens[deepspeed.comm.get_rank() :][:1]
    losses = []
    for _ in range(steps * 2):
        loss = engine(mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: tensor.clone() for name, tensor in engine.iter_full()}
    return losses, weights


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_bert_trains_alike_at_every_stage(stage):
    pattern = {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "num_sliding_window_blocks": 3}
    results = run_ranks(_trained, 2, stage, 2, 128, pattern)
    plain = run_ranks(_trained, 2, 0, 2, 128, pattern)
    for (losses, weights), (wanted, wanted_weights) in zip(results, plain, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-6)
        for name, tensor in wanted_weights.items():
            assert (weights[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.slow
def test_bert_trains_at_4096_tokens():
    ((losses, _),) = run_ranks(_trained, 1, 0, 4, 4096, {"mode": "fixed", "block": 64}, timeout=200)
    assert losses[-1] < losses[0] - 0.1
