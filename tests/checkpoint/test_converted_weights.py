"""export_weights with merged adapters, and with names, shapes and values of checkpoints: as PEFT and Transformers."""

import copy
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from tests.checkpoint.test_export_weights import AXES, SIZES, _LiveBytes
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model

pytestmark = needs_transformers

LORA = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}
EMBEDDINGS = {**LORA, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
METHODS = [
    ("LoraConfig", LORA, {}),
    ("LoraConfig", {**LORA, "use_dora": True}, {}),
    ("LoraConfig", {**EMBEDDINGS, "modules_to_save": ["norm"]}, {}),
    ("LoraConfig", EMBEDDINGS, {"tie_word_embeddings": True}),
    ("LoraConfig", {**LORA, "trainable_token_indices": [1, 3]}, {"tie_word_embeddings": True}),
    ("LoraConfig", {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, {}),
    ("VeraConfig", {"target_modules": ["q_proj", "v_proj"], "r": 4}, {}),
]
STAGES = [
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
]


def _adapted(method: str, arguments: dict, sizes: dict, dtype: torch.dtype) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        causal_model("Mixtral", seed=1, **{**SIZES, **sizes}), getattr(peft, method)(**arguments)
    )
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model.to(dtype)


def _saved(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    place = folder / str(len([*folder.iterdir()]))
    dist.barrier()
    model.save_pretrained(place)  # writes on rank 0
    dist.barrier()
    return load_file(place / "model.safetensors")


def _engine_of(model: torch.nn.Module, **config: object) -> deepspeed.DeepSpeedEngine:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **config}
    return deepspeed.initialize(model=model, config=config)[0]


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), (what, name)


def _described(engine: deepspeed.DeepSpeedEngine, **how: object) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(info.name, info.dtype, info.shape) for info in engine.weight_metadata(**how)]


@on_ranks(2)
def test_adapters_are_merged_as_by_peft(tmp_path: Path) -> None:
    for number, (method, arguments, sizes) in enumerate(METHODS):
        for more in STAGES[number % 3 :][:1] if number else STAGES:
            model = _adapted(method, arguments, sizes, torch.bfloat16 if "bf16" in more else torch.float32)
            merged = copy.deepcopy(model).merge_and_unload()
            expected = {name: value.detach() for name, value in merged.named_parameters()}
            engine = _engine_of(model, **more)
            before = dict(engine.export_weights(ranks="all"))
            found = dict(engine.export_weights(ranks="all", adapters="merged"))
            _assert_same(found, expected, (arguments, more))
            shapes = [(name, value.dtype, tuple(value.shape)) for name, value in found.items()]
            assert _described(engine, adapters="merged") == shapes
            _assert_same(dict(engine.export_weights(ranks="all")), before, "the engine's own")
            in_files = dict(engine.export_weights(ranks="all", adapters="merged", names="checkpoint"))
            _assert_same(in_files, _saved(merged, tmp_path), (arguments, more))
            assert not any("lora_" in name or "base_layer" in name for name in in_files)
            engine.destroy()


@on_ranks(2)
def test_names_and_values_of_checkpoints_come_out_of_every_cut(tmp_path: Path) -> None:
    for family in ("Mixtral", "GptOss"):
        for more in AXES if family == "Mixtral" else AXES[-1:]:
            sizes = {**SIZES, "tie_word_embeddings": more is AXES[0]}
            model = causal_model(family, seed=1, **sizes).to(torch.bfloat16 if "bf16" in more else torch.float32)
            expected = _saved(model, tmp_path)
            engine = _engine_of(model, **more)
            found = dict(engine.export_weights(ranks="all", names="checkpoint"))
            _assert_same(found, expected, (family, more))
            assert _described(engine, names="checkpoint") == [(n, v.dtype, tuple(v.shape)) for n, v in found.items()]
            rounded = dict(engine.export_weights("int8", ranks="all", names="checkpoint"))
            experts = [name for name in rounded if ".experts." in name and name.endswith("weight_scale")]
            assert len(experts) == {"Mixtral": 24, "GptOss": 4}[family], (family, sorted(rounded))
            engine.destroy()


@on_ranks(2)
def test_pipelines_export_the_names_of_the_transformers_model(tmp_path: Path) -> None:
    model = causal_model("Mixtral", seed=1, **SIZES)
    expected = _saved(model, tmp_path)
    engine = _engine_of(PipelineModule.from_transformers(model, num_stages=2))
    _assert_same(dict(engine.export_weights(ranks="all", names="checkpoint")), expected, "pipeline")
    engine.destroy()


@on_ranks(2)
def test_merging_gathers_no_more_than_one_tensor_at_a_time() -> None:
    sizes = {"num_hidden_layers": 8, "vocab_size": 64}
    model = _adapted(
        "LoraConfig", {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, sizes, torch.float32
    )
    nbytes = [4 * parameter.numel() for parameter in model.parameters()]
    engine = _engine_of(model, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    with _LiveBytes() as live:
        for _, value in engine.export_weights(bucket_bytes=1, adapters="merged", names="checkpoint"):
            del value
    assert live.peak <= 3 * max(nbytes) + 4096 < sum(nbytes) / 4, (live.peak, max(nbytes))
    engine.destroy()


@on_ranks(2)
def test_another_thread_may_walk(rank: int) -> None:
    engine = _engine_of(_adapted("LoraConfig", LORA, {}, torch.float32), zero_optimization={"stage": 3})
    expected = dict(engine.export_weights(adapters="merged"))
    found: dict[str, torch.Tensor] = {}
    walk = threading.Thread(target=lambda: found.update(engine.export_weights(adapters="merged")))
    walk.start()
    walk.join()
    _assert_same(found, expected, "thread")
    assert bool(found) == (rank == 0)
    engine.destroy()


@on_ranks(1)
def test_what_does_not_fit_is_refused() -> None:
    peft = pytest.importorskip("peft")
    plain = _engine_of(torch.nn.Linear(2, 2))
    adapted = _engine_of(_adapted("LoraConfig", LORA, {}, torch.float32))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted = _engine_of(peft.get_peft_model(causal_model("Mixtral", **SIZES), prompt))
    for engine, how, message in (
        (plain, {"adapters": "merged"}, "expected a model of peft.get_peft_model, found Linear"),
        (plain, {"names": "checkpoint"}, "expected a model of Transformers, found Linear"),
        (adapted, {"names": "checkpoint"}, 'expected adapters="merged" or adapters="only"'),
        (prompted, {"adapters": "merged"}, "found PromptTuningConfig, which adds a prompt"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=message):
            engine.weight_metadata(**how)
