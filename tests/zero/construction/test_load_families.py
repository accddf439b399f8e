"""from_pretrained at ZeRO stage 3 loads what stage 0 loads, or is an error on every rank."""

import os

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import CheckpointError
from tests.harness import on_ranks
from tests.zero.construction import pretrained as models
from tests.zero.construction.test_init import full_values

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

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
def test_buffers_of_any_strides_are_loaded_on_every_rank(tmp_path):
    folder = str(tmp_path)
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
def test_families_with_conversions_load_as_at_stage_0(tmp_path):
    folder = str(tmp_path)
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
def test_files_that_do_not_fit_are_an_error_on_every_rank(tmp_path):
    folder = str(tmp_path)
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
