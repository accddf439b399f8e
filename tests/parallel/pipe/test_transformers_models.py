"""Transformers models become pipelines: the same losses and weights as the model itself, and their names are found."""

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.parallel.pipe.transformers_models import layers_of, next_token_loss
from deepspeed.pipe import PipelineModule, transformers_state_dict
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import on_ranks
from tests.harness.pool import run_ranks

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=37, n_embd=24, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=True,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, head_dim=6,
        num_key_value_heads=2, max_position_embeddings=32, sliding_window=3, final_logit_softcapping=5.0,
    ),
}  # fmt: skip
COUNT = 3


def _model(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def _items(step):
    made = torch.Generator().manual_seed(step)
    items = []
    for number in range(COUNT):
        tokens = torch.randint(37, (2, 6 + number), generator=made)
        mask = torch.ones_like(tokens)
        mask[1, : number + 1] = 0
        items.append((tokens, mask))
    return items


def _plain(name):
    model = _model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for step in range(2):
        losses = []
        for tokens, mask in _items(step):
            loss = next_token_loss(model(input_ids=tokens, attention_mask=mask, use_cache=False).logits, tokens)
            (loss / COUNT).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(losses) / COUNT)
    return means, {key: value.detach() for key, value in model.named_parameters()}


def _pipeline(name, stages, folder):
    from deepspeed.parallel.pipe.transformers_models import transformers_names

    module = PipelineModule.from_transformers(_model(name), num_stages=stages)
    names = transformers_names(module._layer_specs)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    means = []
    for step in range(2):
        data = [((tokens, mask), tokens) for tokens, mask in _items(step)]
        means.append(engine.train_batch(iter(data)).item())
    engine.save_checkpoint(folder)
    weights = {}
    for own, value in engine.iter_full("fp32"):
        beginning = next(one for one in names if own.startswith(one))
        weights[names[beginning] + own.removeprefix(beginning)] = value.clone()
    return means, weights


FIVE = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4}
GROUPED = {**FIVE, "intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 32}
OPT = {**FIVE, "ffn_dim": 40, "max_position_embeddings": 32, "pad_token_id": 1}
# Blocks that return a tuple or a tensor, take biases for positions, or windows in some layers only; a decoder inside
# the model, and without a last norm but with vectors of tokens that are narrower than those of blocks.
MORE = {
    "Falcon": {**FIVE, "multi_query": True, "alibi": True},
    "GPTJ": {"vocab_size": 37, "n_embd": 24, "n_layer": 5, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
    "Bloom": {"vocab_size": 37, "hidden_size": 24, "n_layer": 5, "n_head": 4},
    "Qwen3": {**GROUPED, "head_dim": 6},
    "Phi3": {**GROUPED, "pad_token_id": 0, "sliding_window": 3},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "OPT": {**OPT, "word_embed_proj_dim": 24},
    "OPT narrow": {**OPT, "word_embed_proj_dim": 12, "do_layer_norm_before": False},
    "GptOss": {**GROUPED, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
}


@on_ranks(1)
def test_more_models_compute_what_they_did() -> None:
    (tokens, mask), *_ = _items(0)
    found = []
    for name, sizes in MORE.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name.split()[0]}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            made = PipelineModule.from_transformers(model, num_stages=1).eval()((tokens, mask))
        if not torch.equal(made[mask.bool()], expected[mask.bool()]):
            found.append(name)
    assert found == []


@on_ranks(1)
def test_models_that_skip_blocks_are_refused() -> None:
    config = transformers.OPTConfig(**OPT, word_embed_proj_dim=24, layerdrop=1.0)
    module = PipelineModule.from_transformers(config, num_stages=1)
    with pytest.raises(NotYetSupportedError, match="OPTDecoder calls 0 of its 5 blocks; .* switch off .* .layerdrop"):
        module(_items(0)[0])


def test_a_model_with_weights_outside_of_all_layers_is_refused():
    model = _model("llama")
    model.codec_model = torch.nn.Linear(3, 3)
    words = r"LlamaForCausalLM has 2 weights beside its decoder .model. .* in codec_model .codec_model.weight"
    with pytest.raises(NotYetSupportedError, match=words):
        layers_of(model)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_stages_compute_like_the_model(name, tmp_path):
    means, weights = run_ranks(_plain, 1, name)[0]
    results = run_ranks(_pipeline, 2, name, 2, str(tmp_path))
    found = {}
    for losses, part in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(means), rtol=2e-6, atol=1e-6)
        found |= part
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=2e-6, msg=lambda text, key=key: key + text)
    # Back into the model: one state dict by its own names.
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    model = _model(name)
    model.load_state_dict(transformers_state_dict(state, CONFIGS[name]()))
    trained = dict(model.named_parameters())
    assert all(torch.equal(trained[key], value) for key, value in found.items())
    with pytest.raises(DeepSpeedConfigError, match="'other' is no name of a pipeline of this model"):
        transformers_state_dict({"other": None}, CONFIGS[name]())


def _from_config(name):
    module = PipelineModule.from_transformers(CONFIGS[name](), num_stages=2, partition_method="plan")
    here = sum(parameter.numel() for parameter in module.parameters())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.0,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = [((tokens, mask), tokens) for tokens, mask in _items(0)]
    losses = [engine.train_batch(iter(data)).item() for _ in range(4)]
    assert losses[-1] < losses[0] and abs(losses[0] - torch.tensor(37.0).log().item()) < 0.5
    return here


def test_from_a_configuration_a_stage_builds_its_own():
    whole = sum(parameter.numel() for parameter in _model("llama").parameters())
    assert sum(run_ranks(_from_config, 2, "llama")) == whole


def _shared_heads(stages, tensor):
    """One key/value head for all tensor ranks, and a last stage without attention."""
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.num_key_value_heads, config.num_hidden_layers = 1, 1
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=1)
    layers = layers_of(transformers.AutoModelForCausalLM.from_config(config))
    bounds = [0, len(layers) - 1, len(layers)] if stages == 2 else [0, len(layers)]
    module = PipelineModule(layers, topology=topology, loss_fn=next_token_loss, partition_method=bounds)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    means = []
    for step in range(2):
        loss = engine.train_batch(iter([((tokens, mask), tokens) for tokens, mask in _items(step)])).item()
        means.append((loss, engine.get_global_grad_norm()))
    return means


def test_shared_key_heads_beside_a_stage_without_attention():
    expected = run_ranks(_shared_heads, 1, 1, 1)[0]
    for found in run_ranks(_shared_heads, 4, 2, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def _compiled():
    found = []
    for is_compiled in (False, True):
        module = PipelineModule.from_transformers(_model("gpt2"), num_stages=1)
        if is_compiled:
            module.compile(backend="eager")
        tokens = torch.arange(12).view(2, 6)
        loss = module.loss_fn(module(tokens), tokens)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    return [torch.allclose(plain, compiled, atol=1e-6) for plain, compiled in zip(*found, strict=True)]


def test_a_pipeline_can_be_compiled():
    assert all(run_ranks(_compiled, 1)[0])
