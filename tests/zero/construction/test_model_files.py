"""Models of Transformers from files at stage 3."""

import copy
import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointError, ShardedAccessError
from deepspeed.zero import GatheredParameters
from tests.harness import on_ranks
from tests.zero.construction import pretrained as models
from tests.zero.construction.test_init import full_values, same_everywhere

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertForMaskedLM,
    DistilBertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
    Wav2Vec2ForSequenceClassification,
    initialization,
)

# transformers under ZeRO stage 3: from_config and from_pretrained shard while they build and load.


CASES = ["gpt2", "llama", "t5", "vit", "mixtral", "bert"]


def _case(name):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = {
        "t5": transformers.AutoModelForSeq2SeqLM, "vit": transformers.AutoModelForImageClassification,
        "bert": transformers.AutoModelForMaskedLM,
    }.get(name, transformers.AutoModelForCausalLM)  # fmt: skip
    return kind, getattr(models, f"{name}_config")()


def _inputs(name, rank):
    if name == "vit":
        pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    tokens = models.tokens(rank)
    return {"input_ids": tokens, "labels": tokens}


def settings(**more):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=180)
def test_load_build_and_train(name, folder):
    from transformers.trainer_pt_utils import get_model_param_count

    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind, config = _case(name)
    torch.manual_seed(0)
    saved = kind.from_config(config)
    if rank == 0:
        saved.save_pretrained(folder, max_shard_size="60KB")
    dist.barrier()
    assert sum(file.endswith(".safetensors") for file in os.listdir(folder)) > 1
    plain = kind.from_pretrained(folder)
    with models.zero3_switched_on(models.auto_config()):
        torch.manual_seed(rank)
        model = kind.from_pretrained(folder)
        built = kind.from_config(config)
        assert get_model_param_count(model) == sum(p.numel() for p in plain.parameters())
    for each in (model, built):
        assert all(p.shape == (0,) and p.dtype == torch.float32 for p in each.parameters())
        assert [n for n, _ in each.named_parameters()] == [n for n, _ in plain.named_parameters()]  # tied as before
    values = full_values(model)
    assert same_everywhere(values)
    for parameter_name, parameter in plain.named_parameters():
        assert torch.equal(values[parameter_name], parameter), parameter_name
    for (buffer_name, buffer), (_, mine) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, mine), buffer_name
    # from_config: other numbers, the same kind of numbers.
    fresh = full_values(built)
    assert same_everywhere(fresh)
    for parameter_name, parameter in saved.named_parameters():
        mine, theirs = fresh[parameter_name].std(), parameter.std()
        if parameter.numel() > 500:
            assert abs(mine - theirs) < 0.2 * theirs, parameter_name
        assert torch.isfinite(fresh[parameter_name]).all(), parameter_name
    engine = deepspeed.initialize(model=model, config=settings())[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    engine.train()
    plain.train()
    for module in [*model.modules(), *plain.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for step in range(2):
        loss = engine(**_inputs(name, rank + 10 * step)).loss
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        for other in range(ranks):
            reference = plain(**_inputs(name, other + 10 * step)).loss
            (reference / ranks).backward()
            if other == rank:
                torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
        optimizer.step()
    masters = dict(engine.iter_full("fp32"))
    for parameter_name, parameter in plain.named_parameters():
        torch.testing.assert_close(masters[parameter_name], parameter.detach(), rtol=1e-3, atol=1e-4)
    if name in ("gpt2", "llama"):
        engine.eval()
        plain.eval()
        prompt = models.tokens(5, batch=1, length=4)
        found = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        assert torch.equal(found, plain.generate(prompt, max_new_tokens=4, do_sample=False))


@on_ranks(2)
def test_half_precision_keeps_rotary_tables(folder):
    kind, config = _case("llama")
    torch.manual_seed(0)
    saved = kind.from_config(config, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        saved.save_pretrained(folder, max_shard_size="60KB")
    dist.barrier()
    plain = kind.from_pretrained(folder, dtype=torch.bfloat16)
    with models.zero3_switched_on(models.auto_config(bf16={"enabled": True})):
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
    values = full_values(model)
    for name, parameter in plain.named_parameters():
        assert values[name].dtype == torch.bfloat16 and torch.equal(values[name], parameter), name
    for (name, buffer), (_, mine) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert mine.dtype == buffer.dtype and torch.equal(mine, buffer), name  # rotary tables keep their precision
    engine = deepspeed.initialize(model=model, config=settings(bf16={"enabled": True}))[0]
    tokens = models.tokens(dist.get_rank())
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


@on_ranks(2)
def test_missing_keys_and_resized_embeddings(folder):
    import transformers

    rank = dist.get_rank()
    kind, config = _case("gpt2")
    torch.manual_seed(0)
    saved = kind.from_config(config)
    if rank == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    with models.zero3_switched_on(models.auto_config()):
        # The head is not in the files: it is initialized, equal on all ranks.
        torch.manual_seed(rank)
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
        found = full_values(classifier)
        assert same_everywhere(found) and found["score.weight"].std() > 1e-3
        assert torch.equal(found["transformer.h.1.mlp.c_fc.weight"], saved.transformer.h[1].mlp.c_fc.weight)
        # Resized embeddings are made outside of zero.Init and tied again.
        model = kind.from_pretrained(folder)
        model.resize_token_embeddings(103)
        assert model.lm_head.weight is model.transformer.wte.weight
    engine = deepspeed.initialize(model=model, config=settings())[0]
    masters = dict(engine.iter_full("fp32"))
    assert masters["transformer.wte.weight"].shape == (103, 32)
    assert torch.equal(masters["transformer.wte.weight"][:97], saved.transformer.wte.weight)
    assert same_everywhere(masters)
    tokens = models.tokens(rank)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


@pytest.mark.slow
@on_ranks(2)
def test_models_that_gather_single_tensors(folder):
    """Models whose code gathers one tensor at a time to fill in a table of positions."""
    import transformers

    kinds = {
        "distilbert": (transformers.DistilBertModel, models.distilbert_config(sinusoidal_pos_embds=True)),
        "patchtst": (transformers.PatchTSTForPrediction, models.patchtst_config()),
    }
    for name, (kind, config) in kinds.items():
        torch.manual_seed(0)
        plain = kind(config)
        if dist.get_rank() == 0:
            plain.save_pretrained(os.path.join(folder, name))
        dist.barrier()
        with models.zero3_switched_on(models.auto_config()):
            model = kind.from_pretrained(os.path.join(folder, name))
            built = kind._from_config(config)
        assert all(p.shape == (0,) for p in [*model.parameters(), *built.parameters()])
        values, fresh = full_values(model), full_values(built)
        assert same_everywhere(values) and same_everywhere(fresh)
        for parameter_name, parameter in plain.named_parameters():
            assert torch.equal(values[parameter_name], parameter), parameter_name
            if not parameter.requires_grad:  # the table: no chance is in it
                torch.testing.assert_close(fresh[parameter_name], parameter.detach())


@on_ranks(2)
def test_adapters_on_a_sharded_model():
    pytest.importorskip("peft")
    import peft

    rank = dist.get_rank()
    kind, config = _case("gpt2")
    with models.zero3_switched_on(models.auto_config()):
        torch.manual_seed(0)
        base = kind.from_config(config)
    before = full_values(base)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, lora)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    adapter = next(p for name, p in model.named_parameters() if "lora_A" in name)
    assert tuple(getattr(adapter, "ds_shape", adapter.shape)) == (4, 32)
    engine = deepspeed.initialize(model=model, config=settings())[0]
    tokens = models.tokens(rank)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        assert deepspeed.utils.safe_get_full_grad(adapter).shape == (4, 32)
        engine.step()
    with GatheredParameters(model.parameters()):
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, value in before.items():
        key = next((k for k in after if k.replace("base_model.model.", "").replace(".base_layer", "") == name), None)
        if key is not None:
            assert torch.equal(after[key], value), name
    assert any(value.any() for name, value in after.items() if "lora_B" in name)


# The passes of transformers that give weights their first values, over models that zero.Init has sharded.


class OddConfig(PreTrainedConfig):
    model_type = "odd"

    def __init__(self, fails: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.fails = fails


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Bilinear(2, 3, 4))


class OddModel(PreTrainedModel):
    """A pass that goes further down than to a module's children, asks for shapes, and leaves weights out."""

    config: OddConfig
    base_model_prefix = "odd"

    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Block):
            initialization.ones_(module.scale)
            initialization.copy_(module.table, torch.arange(5.0))
            initialization.normal_(module.inner[0].weight, std=module.inner[0].weight.shape[1] ** -0.5)
            initialization.xavier_uniform_(module.inner[1].weight[0])
            if self.config.fails:
                raise LookupError("in the middle")
        elif module is self:
            for name, parameter in self.named_parameters():
                if name.endswith("inner.0.bias"):
                    initialization.constant_(parameter, math.sqrt(parameter.numel()))


CASES_TRANSFORMERS_PASSES = {
    "gpt2": (GPT2LMHeadModel, models.gpt2_config),
    "llama": (LlamaForCausalLM, models.llama_config),
    "bert": (BertForMaskedLM, models.bert_config),  # a bias is fitted to the tied weight
    "distilbert": (DistilBertModel, lambda: models.distilbert_config(sinusoidal_pos_embds=True)),  # rank 0's table
    "t5": (T5ForConditionalGeneration, models.t5_config),
    "wav2vec2": (Wav2Vec2ForSequenceClassification, models.wav2vec2_config),
    "odd": (OddModel, OddConfig),
}


def _as_unsharded(name):
    """The same draws of random numbers in the same order: constructors first, then one pass over everything."""
    kind, config = CASES_TRANSFORMERS_PASSES[name][0], CASES_TRANSFORMERS_PASSES[name][1]()
    torch.manual_seed(3)
    with mock.patch.object(PreTrainedModel, "init_weights", lambda self: None):
        plain = kind(copy.deepcopy(config))
    plain.initialize_weights()
    plain.tie_weights()
    with models.zero3_switched_on(models.auto_config()):
        torch.manual_seed(3 + dist.get_rank())  # rank 0's numbers count
        built = kind._from_config(config)
    values = full_values(built)
    assert same_everywhere(values)
    for parameter_name, parameter in plain.named_parameters():
        assert torch.equal(values[parameter_name], parameter), (name, parameter_name)
    for (buffer_name, buffer), (_, mine) in zip(plain.named_buffers(), built.named_buffers(), strict=True):
        assert buffer.dtype == mine.dtype and torch.equal(buffer, mine), (name, buffer_name)
    return built


@on_ranks(2)
def test_the_values_are_those_of_an_unsharded_model():
    for name in CASES_TRANSFORMERS_PASSES:
        built = _as_unsharded(name)
    # Outside of the pass nothing is served.
    weight = built.blocks[0].inner[0].weight
    assert weight.shape == (0,) and weight.ds_shape == (6, 4)
    for touch in (lambda: nn.init.zeros_(weight), lambda: weight.sum(), lambda: built._init_weights(built.blocks[0])):
        with pytest.raises(ShardedAccessError, match="outside the engine's forward"):
            touch()
    # A pass that fails changes nothing that was not given back before, and leaves nothing open.
    before = full_values(built)["blocks.1.scale"]
    built.config.fails = True
    for module in built.modules():
        module._is_hf_initialized = False
    with torch.no_grad(), pytest.raises(LookupError):
        built.initialize_weights()
    assert all(p.shape == (0,) for p in built.parameters())
    assert torch.equal(full_values(built)["blocks.1.scale"], before)


@on_ranks(2)
def test_weights_under_weight_norm_load_and_train(rank, ranks, folder):
    kind, config = Wav2Vec2ForSequenceClassification, models.wav2vec2_config()
    torch.manual_seed(0)
    saved = kind(config)
    if rank == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    plain = kind.from_pretrained(folder)
    with models.zero3_switched_on(models.auto_config()):
        model = kind.from_pretrained(folder)
    values = full_values(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model.train(), config=config)[0]
    optimizer = torch.optim.SGD(plain.train().parameters(), lr=0.5)
    for step in range(3):
        waves = [torch.randn(2, 400, generator=torch.Generator().manual_seed(3 * step + r)) for r in range(ranks)]
        labels = torch.tensor([0, 1])
        loss = engine(input_values=waves[rank], labels=labels).loss
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        for other, wave in enumerate(waves):
            reference = plain(input_values=wave, labels=labels).loss
            (reference / ranks).backward()
            if other == rank:
                torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
        optimizer.step()
        masters = dict(engine.iter_full("fp32"))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    position = "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original"
    assert all(not torch.equal(masters[f"{position}{n}"], values[f"{position}{n}"]) for n in (0, 1))


# from_pretrained at ZeRO stage 3 loads what stage 0 loads, or is an error on every rank.


TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 1,
}  # fmt: skip
EXPERTS = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "projection_dim": 16,
}  # fmt: skip

FAMILIES = {
    # experts that files hold one by one
    "mixtral": {**TEXT, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 8},
    "gpt_oss": {**TEXT, "num_local_experts": 4},
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1,
    },
    "jamba": {**TEXT, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4},
    # renamed by rules of parts of the model
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VISION, "model_type": "clip_vision_model"},
    },
    # names that the library's own loader for stage 3 misses
    "deepseek_v4": {
        **EXPERTS, "n_routed_experts": 4, "num_key_value_heads": 1, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "o_groups": 2, "o_lora_rank": 8, "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 2,
        "layer_types": ["heavily_compressed_attention"] * 2, "mlp_layer_types": ["hash_moe", "moe"],
    },
    # a buffer in a dtype of its own
    "recurrent_gemma": {**TEXT, "lru_width": 32, "head_dim": 8, "attention_window_size": 8},
    # transposed if the shape in the model requires it
    "qwen3_vl_moe": {
        "text_config": {**EXPERTS, "num_local_experts": 4},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 4, "out_hidden_size": 16,
            "patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip


def _build(name):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    for kind in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModel,
    ):
        if type(config) in kind._model_mapping:
            return kind._model_mapping[type(config)], config
    raise LookupError(name)


@on_ranks(2)
def test_buffers_of_any_strides_are_loaded_on_every_rank(folder):
    import transformers

    class Strided(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("gappy", torch.arange(8.0)[::2])
            self.register_buffer("repeated", torch.arange(2.0)[:, None].expand(2, 3))
            self.post_init()

    place = os.path.join(folder, "strided")
    if dist.get_rank() == 0:
        model = Strided(models.llama_config())
        model.gappy.fill_(5.0)
        model.repeated[:, 0].fill_(6.0)
        model.save_pretrained(place)
    dist.barrier()
    with models.zero3_switched_on(models.auto_config()):
        model = Strided.from_pretrained(place)
    assert (model.gappy.tolist(), model.repeated.tolist()) == ([5.0] * 4, [[6.0] * 3] * 2)


@on_ranks(2, timeout=180)
def test_families_with_conversions_load_as_at_stage_0(folder):
    for name in FAMILIES:
        kind, config = _build(name)
        place = os.path.join(folder, name)
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            model = kind(config)
            for parameter in model.parameters():
                parameter.data.normal_()
            model.save_pretrained(place, max_shard_size="20KB")
        dist.barrier()
        plain, found = kind.from_pretrained(place, output_loading_info=True)
        with models.zero3_switched_on(models.auto_config()):
            sharded, info = kind.from_pretrained(place, output_loading_info=True)
        assert info == found, name
        assert all(p.shape == (0,) for p in sharded.parameters())
        values = full_values(sharded)
        expected = dict(plain.named_parameters(remove_duplicate=False))
        assert values.keys() == expected.keys()
        for each, parameter in expected.items():
            assert values[each].dtype == parameter.dtype and torch.equal(values[each], parameter), (name, each)
        for (each, buffer), (_, mine) in zip(plain.named_buffers(), sharded.named_buffers(), strict=True):
            assert buffer.dtype == mine.dtype and torch.equal(buffer, mine), (name, each)
        served = deepspeed.init_inference(kind(config), checkpoint=place, dtype=torch.float32).module
        for each, value in served.state_dict().items():
            assert torch.equal(value, plain.state_dict()[each]), (name, each)


@on_ranks(2)
def test_files_that_do_not_fit_are_an_error_on_every_rank(folder):
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM, MixtralForCausalLM

    def spoil(place, change):
        if dist.get_rank() == 0:
            file = os.path.join(place, "model.safetensors")
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})
        dist.barrier()

    def saved(kind, config, name):
        place = os.path.join(folder, name)
        if dist.get_rank() == 0:
            kind(config).save_pretrained(place)
        dist.barrier()
        return place

    def resize(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 5)

    def drop(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    def drop_expert(tensors):
        for key in [key for key in tensors if "layers.1" in key and ".experts.2.w1" in key]:
            del tensors[key]

    def rename(tensors):
        for key in [key for key in tensors if ".mlp." in key]:
            tensors[key.replace(".mlp.", ".ffn.")] = tensors.pop(key)

    llama, mixtral = models.llama_config(), models.mixtral_config()
    cases = {
        "shape": (LlamaForCausalLM, llama, resize, r"layers\.1\.mlp\.up_proj\.weight is \(3, 5\) in the files"),
        "missing": (LlamaForCausalLM, llama, drop, r"1 tensors of the blocks .* model\.layers\.1\.mlp\.up_proj"),
        "renamed": (LlamaForCausalLM, llama, rename, r"9 tensors of the blocks .* does not take"),
        "expert": (MixtralForCausalLM, mixtral, drop_expert, r"could not be converted .*layers\.1\.mlp\.experts"),
    }  # fmt: skip
    with models.zero3_switched_on(models.auto_config()):
        for name, (kind, config, change, words) in cases.items():
            place = saved(kind, config, name)
            spoil(place, change)
            with pytest.raises(CheckpointError, match=words):
                kind.from_pretrained(place)
        model, info = LlamaForCausalLM.from_pretrained(
            os.path.join(folder, "shape"), ignore_mismatched_sizes=True, output_loading_info=True
        )
        assert [key for key, *_ in info["mismatched_keys"]] == ["model.layers.1.mlp.up_proj.weight"]
        value = full_values(model)["model.layers.1.mlp.up_proj.weight"]
        assert value.shape == (48, 32) and 0.01 < value.std() < 0.03  # initialized
        with pytest.raises(Exception, match="invalid header length"):  # rank 0 fails while it reads
            spoil(os.path.join(folder, "expert"), lambda tensors: None)
            if dist.get_rank() == 0:
                with open(os.path.join(folder, "expert", "model.safetensors"), "r+b") as file:
                    file.truncate(100)
            dist.barrier()
            MixtralForCausalLM.from_pretrained(os.path.join(folder, "expert"))
