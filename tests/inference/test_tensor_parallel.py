"""Layers shared by several ranks: tokens equal to plain generation, for many families, from memory and from files."""

import json
import os

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import CheckpointError, DeepSpeedConfigError, DivergenceError
from tests.harness import on_ranks, run_ranks

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SHAPES = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3": LLAMA,
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "hidden_size": 64, "ffn_dim": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 64,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "gemma": LLAMA,
}  # fmt: skip
THIN = ("llama", "gpt2")


def make(family, device="cpu"):
    torch.manual_seed(0)
    ids = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **ids, **SHAPES[family])
    if device == "meta":
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            return transformers.AutoModelForCausalLM.from_config(config).eval()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(3)  # so that tokens are decided clearly
    return model


def prompts(group=0):
    """Three prompts of different lengths, padded on the left."""
    lengths = (9, 4 + group, 6)
    ids = torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 9 - length :] = (torch.arange(length) * 11 + 5 * row + 17 * group) % 97 + 3
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def tokens(model, group=0, **kwargs):
    torch.manual_seed(4)
    return model.generate(**prompts(group), max_new_tokens=8, **{"do_sample": False, **kwargs})


def agree(families, size):
    """Every family: greedy, beams, drawn; each group of ranks brings prompts of its own."""
    group = dist.get_rank() // size
    for family in families:
        engine = deepspeed.init_inference(make(family), dtype="fp32", tensor_parallel={"tp_size": size})
        ways: list[dict] = [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}]
        for kwargs in ways if size == 2 else ways[:2]:
            found, plain = tokens(engine, group, **kwargs), tokens(make(family), group, **kwargs)
            assert torch.equal(found, plain), (family, size, kwargs, found.tolist(), plain.tolist())
        held = sum(p.numel() for p in engine.parameters())
        assert held < 0.9 * sum(p.numel() for p in make(family).parameters()), family
        assert dist.get_world_size(engine.mp_group) == size


def on_both_sizes(families):
    for size in (2, 4):
        agree(families, size)


def test_tokens_are_those_of_plain_generation():
    run_ranks(on_both_sizes, 4, ("llama",), timeout=300)


@pytest.mark.slow
def test_tokens_of_more_families():
    run_ranks(on_both_sizes, 4, tuple(SHAPES), timeout=600)


@pytest.mark.parametrize("family", SHAPES)
def test_one_rank(family):
    engine = deepspeed.init_inference(make(family), dtype="fp32")
    for kwargs in ({}, {"num_beams": 3}):
        assert torch.equal(tokens(engine, **kwargs), tokens(make(family), **kwargs))


def through_files(families, folder):
    """Written by two ranks; read by two, by four and by one, on meta and not; a rank reads its share."""
    rank = dist.get_rank()
    for family in families:
        place = os.path.join(folder, family)
        plain = tokens(make(family))
        deepspeed.init_inference(make(family), dtype="fp32", mp_size=2, save_mp_checkpoint_path=place)
        dist.barrier()
        assert json.loads(open(f"{place}/ds_inference_config.json").read())["tp_size"] == 2
        for size in (2, 4, 1):
            read = Counted()
            with read:
                engine = deepspeed.init_inference(make(family, "meta"), dtype="fp32", mp_size=size, checkpoint=place)
            assert torch.equal(tokens(engine), plain), (family, size)
            # What a rank reads is what it holds (ranks that have the same heads read both copies).
            held = sum(t.numel() for t in {id(t): t for t in engine.state_dict(keep_vars=True).values()}.values())
            assert held <= read.numel <= (1.2 if size == 4 else 1.0) * held, (family, size, read.numel, held)
        whole = os.path.join(folder, f"{family}-whole")
        if rank == 0:
            make(family).save_pretrained(whole)
        dist.barrier()
        with Counted() as read:
            engine = deepspeed.init_inference(make(family, "meta"), dtype="fp32", mp_size=2, checkpoint=whole)
        assert torch.equal(tokens(engine), plain) and read.numel < 0.9 * sum(
            p.numel() for p in make(family).parameters()
        )
    int8 = deepspeed.init_inference(make(family), dtype="int8", mp_size=2)(**prompts()).logits
    read = deepspeed.init_inference(make(family, "meta"), dtype="int8", mp_size=2, checkpoint=whole)(**prompts()).logits
    assert torch.equal(int8, read)
    dist.barrier()
    if rank == 0:
        os.remove(f"{place}/tp_01_00.safetensors")
    dist.barrier()
    with pytest.raises(CheckpointError, match="there is no file .*tp_01_00"):
        deepspeed.init_inference(make(family), dtype="fp32", mp_size=2, checkpoint=place)


class Counted:
    """Counts the elements that are read from files."""

    def __enter__(self):
        from deepspeed.inference import weight_files

        self.numel, self._plain = 0, weight_files._safetensors

        def counting(path, is_part):
            for stored in self._plain(path, is_part):
                yield weight_files.Stored(stored.tile, stored.is_part, self._count(stored.read))

        weight_files._safetensors = counting
        return self

    def _count(self, read):
        def counted(where):
            values = read(where)
            self.numel += values.numel()
            return values

        return counted

    def __exit__(self, *_):
        from deepspeed.inference import weight_files

        weight_files._safetensors = self._plain


def test_weights_of_each_rank_are_written_and_read_by_any_number(tmp_path):
    run_ranks(through_files, 4, THIN, str(tmp_path), timeout=300)


@pytest.mark.slow
def test_files_of_more_families(tmp_path):
    run_ranks(through_files, 4, tuple(SHAPES), str(tmp_path), timeout=600)


@on_ranks(2)
def test_a_file_that_cannot_be_written_raises_on_all_ranks(folder):
    """A rank cannot write one of its files, as a folder has its name."""
    for rank, name in ((1, "tp_01_00.safetensors"), (0, "ds_inference_config.json")):
        path = f"{folder}/{rank}"
        if dist.get_rank() == rank:
            os.makedirs(f"{path}/{name}")
        words = f"{name.split('.')[0]}|Is a directory" if dist.get_rank() == rank else "another rank could not write"
        with pytest.raises(CheckpointError, match=f"save_mp_checkpoint_path {path}: .*({words})"):
            deepspeed.init_inference(make("llama"), dtype="fp32", mp_size=2, save_mp_checkpoint_path=path)


@on_ranks(2)
def test_bad_input_raises():
    plain = make("llama").state_dict()

    def fails_with(words, **config):
        model = make("llama")
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.init_inference(model, {"dtype": "fp32", **config})
        assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())

    two = {"tensor_parallel": {"tp_size": 2}}
    fails_with("tp_size=4: must divide the number of ranks .2.; start a multiple of 4", tensor_parallel={"tp_size": 4})
    fails_with(
        "the model has no GPT2Block; name one of LlamaAttention", injection_policy={"GPT2Block": "c_proj"}, **two
    )
    fails_with("has a linear layer 'c_proj'; its layers are down_proj", injection_policy={"LlamaMLP": "c_proj"}, **two)
    fails_with("injection_policy_tuple: no module .* layer 'mlp.up'", injection_policy_tuple=["mlp.up"], **two)
    both = {"injection_policy_tuple": ["o_proj"], "injection_policy": {"LlamaMLP": "down_proj"}}
    fails_with("give one of them", **both, **two)
    fails_with("save_mp_checkpoint_path cannot be combined with zero", save_mp_checkpoint_path="x", zero={"stage": 3})
    group = dist.new_group([dist.get_rank()])
    fails_with("tp_size is 2, but tp_group has the 1 ranks", tensor_parallel={"tp_size": 2, "tp_group": group})
    engine = deepspeed.init_inference(
        make("llama"), dtype="fp32", injection_policy_tuple=["o_proj", "down_proj"], **two
    )
    assert torch.equal(tokens(engine), tokens(make("llama")))
    different = prompts(dist.get_rank())
    with pytest.raises(DivergenceError, match="given different batches: 'attention_mask' differs"):
        engine(**different)
