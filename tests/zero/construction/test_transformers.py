"""transformers under ZeRO stage 3: from_config and from_pretrained shard while they build and load."""

import os

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.zero import GatheredParameters
from tests.harness import on_ranks
from tests.zero.construction import pretrained as models
from tests.zero.construction.test_init import full_values, same_everywhere

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

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
def test_load_build_and_train(name, tmp_path):
    folder = str(tmp_path)
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
def test_half_precision_keeps_rotary_tables(tmp_path):
    folder = str(tmp_path)
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
def test_missing_keys_and_resized_embeddings(tmp_path):
    folder = str(tmp_path)
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
def test_models_that_gather_single_tensors(tmp_path):
    """Models whose code gathers one tensor at a time to fill in a table of positions."""
    folder = str(tmp_path)
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
