"""init_inference: tokens, few bits, files, ranks."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deepspeed
from deepspeed.errors import CallOrderError, CheckpointError, DeepSpeedConfigError
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import causal_model

# ``init_inference``: tokens equal to the model's own, in every dtype, on any number of ranks; bad input named.


transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(family="Llama", **kwargs):
    model = causal_model(family, **{**SIZES, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that tokens are decided clearly
    return model


def prompts():
    ids = torch.arange(3, 21).view(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def tokens(model, **kwargs):
    return model.generate(**prompts(), max_new_tokens=6, min_new_tokens=6, do_sample=False, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}])
def test_tokens_are_the_models_own(kwargs):
    engine = deepspeed.init_inference(make(), dtype="fp32")
    assert torch.equal(tokens(engine, **kwargs), tokens(make(), **kwargs))
    out = engine(**prompts())
    assert torch.equal(out.logits, make()(**prompts()).logits) and not out.logits.requires_grad
    assert engine.config.vocab_size == 128 and engine.can_generate()


@pytest.mark.parametrize(("config", "bits"), [({}, 8), ({"quant": {"weight": {"num_bits": 4}}}, 4)])
def test_weights_of_few_bits(config, bits):
    reference = make().bfloat16()
    engine = deepspeed.init_inference(make(), config, dtype=torch.int8)
    assert engine.module.model.layers[0].mlp.up_proj.format.bits == bits
    found, expected = engine(**prompts()).logits.float(), reference(**prompts()).logits.float()
    assert found.isfinite().all()
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > (0.99 if bits == 8 else 0.8)
    assert tokens(engine).shape == (2, 15)


def test_parts_of_a_model_are_quantized():
    config = {"quant": {"weight": {"post_init_quant": {"q_proj": {"num_bits": 8}, "gate_proj": {"num_bits": 4}}}}}
    engine = deepspeed.init_inference(make(), config, dtype="bf16")
    block = engine.module.model.layers[1]
    assert (block.self_attn.q_proj.format.bits, block.mlp.gate_proj.format.bits) == (8, 4)
    assert type(block.mlp.up_proj) is torch.nn.Linear


def test_the_callers_dict_stays_as_it_is_and_may_be_a_file(tmp_path):
    config = {"dtype": "bf16", "tensor_parallel": {"tp_size": 1}}
    before = json.dumps(config)
    engine = deepspeed.init_inference(make(), config, max_out_tokens=8)
    assert json.dumps(config) == before and next(engine.parameters()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="9 tokens, max_out_tokens is 8"):
        tokens(engine)
    (tmp_path / "config.json").write_text(before)
    assert deepspeed.init_inference(make(), str(tmp_path / "config.json")).module.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "keywords", "text"),
    [
        ({"dtype": "fp32"}, {"dtype": "bf16"}, "dtype: 'fp32' in the configuration and 'bf16' as keyword"),
        ({"dtyp": "fp32"}, {}, 'dtyp: unknown key; did you mean "dtype"'),
        ({"dtype": "int5"}, {}, "dtype: expected"),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 3}}}, {}, "expected 4 or 8, found 3"),
        ({"quant": {"activation": {"num_bits": 8}}}, {}, "activations stay in 16 bits"),
        ({"quant": {"weight": {"post_init_quant": {"q_proj": 4}}}}, {}, "expected an object with group_dim"),
        ({"quant": {"weight": {"post_init_quant": {"q_proj": {"bits": 4}}}}}, {}, "found bits"),
        ({"quant": {"weight": {"post_init_quant": {"lost": {}}}}}, {}, "no parameter of LlamaForCausalLM has 'lost'"),
        ({"zero": {"stage": 2}}, {}, "only stage 3 saves memory without an optimizer; found 2"),
        ({"mp_size": 2, "tp": {"tp_size": 4}}, {}, "mp_size: found 2, and 4 for tensor_parallel.tp_size"),
        ({"injection_policy_tuple": ["o"], "injection_policy": {"A": "b"}}, {}, "give one of them"),
    ],
)
def test_bad_input_raises(config, keywords, text):
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(DeepSpeedConfigError, match=text):
        deepspeed.init_inference(model, config, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_bad_models_policies_and_prompts_raise():
    for config, text in (
        ({"injection_policy": {"GPT2Block": "c_proj"}}, "the model has no GPT2Block; name one of LlamaAttention"),
        ({"injection_policy": {"LlamaMLP": 3}}, "LlamaMLP: expected names of its layers.*found 3"),
        (
            {"checkpoint": {"checkpoints": {"tp": ["a"]}, "tp_size": "two"}},
            "tp_size: expected the number of files under 'tp', found",
        ),
        ({"quant": {"weight": {"post_init_quant": {"q_proj": {"num_bits": 4, "group_size": 7}}}}}, "size=7.*at 4 bits"),
    ):
        with pytest.raises((DeepSpeedConfigError, CheckpointError), match=text):
            deepspeed.init_inference(make(), {"dtype": "bf16", **config})
    engine = deepspeed.init_inference(make(), dtype="int8")
    with pytest.raises(DeepSpeedConfigError, match="expected a model, found a InferenceEngine"):
        deepspeed.init_inference(engine)
    with pytest.raises(DeepSpeedConfigError, match="found quantized ones .*q_proj in 8 bits"):
        deepspeed.init_inference(engine.module, {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}})
    for prompt, text in (
        ("Once", "expected a tensor .* of integers, found 'Once'; a tokenizer gives it"),
        (torch.ones(1, 3), "found torch.float32 of shape"),
        (torch.ones(3, dtype=torch.long), r"of shape \(3,\)"),
        (torch.ones(2, 0, dtype=torch.long), "at least one token in each prompt, found none"),
        (torch.full((1, 3), 128), "found the id 128; the vocabulary has 0 to 127"),
        (torch.full((1, 3), -1), "found the id -1"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=text):
            engine.generate(prompt, max_new_tokens=2)
    engine.destroy()
    engine.destroy()


def test_a_model_on_meta_reads_files(tmp_path):
    make().save_pretrained(tmp_path)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        empty = causal_model(**SIZES)
    with pytest.raises(DeepSpeedConfigError, match="on the meta device"):
        deepspeed.init_inference(empty, dtype="fp32")
    engine = deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path))
    assert torch.equal(tokens(engine), tokens(make()))
    listed = {"type": "ds_model", "checkpoints": ["model.safetensors"], "version": 1.0, "base_dir": str(tmp_path)}
    (tmp_path / "listed.json").write_text(json.dumps(listed))
    engine = deepspeed.init_inference(make(), dtype="fp32", checkpoint=str(tmp_path / "listed.json"))
    assert torch.equal(tokens(engine), tokens(make()))
    torch.save(make().state_dict(), tmp_path / "whole.bin")
    whole = (tmp_path / "whole.bin").read_bytes()
    for name, content in (("half.bin", whole[: len(whole) // 2]), ("half-text.json", b"\xff"), ("half-text.bin", b"a")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match="half.* (cannot be read|is not valid JSON)"):
            deepspeed.init_inference(make(), dtype="fp32", checkpoint=str(tmp_path / name))
    for name in ("half.safetensors", "half.pt"):
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="half.* cannot be read"):
            deepspeed.init_inference(make(), dtype="fp32", checkpoint=str(tmp_path / name))
    torch.save(make().state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    engine = deepspeed.init_inference(make(), dtype="fp32", checkpoint=str(tmp_path / "old.bin"))
    assert torch.equal(tokens(engine), tokens(make()))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list; expected a state dict"):
        deepspeed.init_inference(make(), dtype="fp32", checkpoint=str(tmp_path / "list.pt"))
    with pytest.raises(CheckpointError, match="expected names of files, found 3"):
        deepspeed.init_inference(make(), dtype="fp32", checkpoint={"checkpoints": [3]})
    with pytest.raises(CheckpointError, match="there is no file"):
        deepspeed.init_inference(make(), dtype="fp32", checkpoint={"checkpoints": [str(tmp_path / "gone.pt")]})
    with pytest.raises(CheckpointError, match="tensors of LlamaForCausalLM are in none"):
        deepspeed.init_inference(
            make(num_hidden_layers=3), dtype="fp32", checkpoint=str(tmp_path / "model.safetensors")
        )


def test_times_and_compile():
    engine = deepspeed.init_inference(make(), dtype="fp32")
    engine.profile_model_time()
    engine(**prompts())
    engine(**prompts())
    times = engine.model_times()
    assert len(times) == 2 and min(times) > 0 and engine.model_times() == []
    new = engine.generate(**prompts(), max_new_tokens=3, eos_token_id=None).shape[1] - prompts()["input_ids"].shape[1]
    times = engine.model_times()
    assert len(times) == new == 3 and min(times) > 0
    engine.compile(backend="eager")
    assert engine.is_compiled and torch.equal(tokens(engine), tokens(make()))


def test_an_engine_that_was_destroyed_raises():
    engine = deepspeed.init_inference(make(), dtype="fp32")
    engine.destroy()
    for use in (engine, engine.generate):
        with pytest.raises(CallOrderError, match="call init_inference again"):
            use(**prompts())
    with pytest.raises(DeepSpeedConfigError, match="expected a torch.nn.Module, found 'gpt2'"):
        deepspeed.init_inference("gpt2")


@on_ranks(2, timeout=300)
def test_two_ranks():
    """Cut and quantized models, and sharded ones, on two ranks."""
    family = "Llama"
    plain = tokens(make(family))
    found = {"cut": torch.equal(tokens(deepspeed.init_inference(make(family), dtype="fp32", mp_size=2)), plain)}
    whole = deepspeed.init_inference(make(family), dtype="int8")(**prompts()).logits.float()
    parts = deepspeed.init_inference(make(family), dtype="int8", mp_size=2)(**prompts()).logits.float()
    found["quantized"] = float((whole - parts).norm() / whole.norm())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = deepspeed.init_inference(make(family), dtype="fp32", zero=zero)
    found["sharded"] = torch.equal(tokens(engine), plain)
    with pytest.raises(
        DeepSpeedConfigError, match="tp_size=3: must divide the number of ranks .2.; start a multiple of 3"
    ):
        deepspeed.init_inference(make(family), dtype="fp32", mp_size=3)
    policy = {"LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj")}
    found["policy"] = torch.equal(
        tokens(deepspeed.init_inference(make(family), dtype="fp32", mp_size=2, injection_policy=policy)), plain
    )
    found["holds"] = sum(p.numel() for p in engine.module.parameters())
    engine = deepspeed.init_inference(make(family), dtype="int8", zero=zero)
    found["sharded, quantized"] = float((engine(**prompts()).logits.float() - whole).norm() / whole.norm())
    assert found["cut"] and found["policy"] and found["sharded"] and found["holds"] == 0
    assert found["quantized"] < 0.05 and found["sharded, quantized"] == 0


def _rotary(zero):
    plain, model = make(), make()
    for each in (plain, model):
        each.to(torch.bfloat16)
        each.model.rotary_emb.inv_freq = make().model.rotary_emb.inv_freq  # as from_pretrained leaves them
    engine = deepspeed.init_inference(model, dtype="bf16", **zero)
    assert torch.equal(engine.module.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    with torch.no_grad():
        assert torch.equal(engine(**prompts()).logits, plain(**prompts()).logits)


def test_rotary_frequencies_keep_their_precision():
    _rotary({})
    run_ranks(_rotary, 1, {"zero": {"stage": 3}})


def test_prompts_by_their_other_name_are_checked():
    engine = deepspeed.init_inference(make(), dtype="fp32", max_out_tokens=4)
    with pytest.raises(RuntimeError, match="max_out_tokens is 4"):
        engine.generate(inputs=torch.ones(1, 5, dtype=torch.long))
    with pytest.raises(DeepSpeedConfigError, match="the vocabulary has"):
        engine.generate(inputs=torch.full((1, 2), 10**6))


def test_dicts_that_are_given_as_keywords_stay_as_they_are():
    given: dict = {}
    deepspeed.init_inference(make(), dtype="fp32", mp_size=1, tensor_parallel=given)
    assert given == {}


def test_tensors_with_common_memory_are_written(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    deepspeed.init_inference(model, dtype="fp32", save_mp_checkpoint_path=str(tmp_path))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    deepspeed.init_inference(other, dtype="fp32", checkpoint=str(tmp_path))
    assert torch.equal(other[1].weight, model[0].weight)


# What weights of 8 and 4 bits cost a model that has learnt something, in perplexity, and what they save, in bytes.


SIZES_FEW_BITS = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTH, STEPS = 64, 250
WAYS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}},
}


def text(names):
    """Bytes of modules of the standard library, as tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join((folder / f"{name}.py").read_bytes() for name in names)
    return torch.tensor(list(data)).clamp_(max=127)


def make_few_bits():
    return causal_model(**SIZES_FEW_BITS)


@pytest.fixture(scope="module")
def trained():
    """The state of a small model after a short training on source code."""
    model, data = make_few_bits(), text(["argparse", "ast", "pathlib", "subprocess", "typing", "tarfile"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (12,), generator=generator)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def engine_of(state, way):
    model = make_few_bits()
    model.load_state_dict(state)
    return deepspeed.init_inference(model, WAYS[way])


@torch.no_grad()
def perplexity(engine):
    unseen = text(["dataclasses", "textwrap"])[: 64 * LENGTH].view(-1, LENGTH)
    logits = engine(input_ids=unseen).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 128), unseen[:, 1:].reshape(-1))
    return loss.exp().item()


@pytest.mark.slow
def test_perplexity_of_a_trained_model(trained):
    found = {way: perplexity(engine_of(trained, way)) for way in WAYS}
    assert found["fp32"] < 15, "it has learnt something; 128 by chance"
    assert abs(found["int8"] / found["fp32"] - 1) <= 0.01, found
    assert abs(found["int4"] / found["fp32"] - 1) <= 0.05, found


def test_files_and_memory(tmp_path):
    state, sizes = make_few_bits().state_dict(), {}
    for way in WAYS:
        engine = engine_of(state, way)
        saved = {name: tensor.contiguous() for name, tensor in engine.module.state_dict().items()}
        save_file(saved, tmp_path / f"{way}.safetensors")
        memory = sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers()))
        sizes[way] = memory, (tmp_path / f"{way}.safetensors").stat().st_size
    for number, what in enumerate(("memory", "file")):
        eight = sizes["int8"][number]
        assert eight <= 0.28 * sizes["fp32"][number], what
        assert eight <= 0.55 * sizes["bf16"][number], what
        assert sizes["int4"][number] <= 0.18 * sizes["fp32"][number], what
