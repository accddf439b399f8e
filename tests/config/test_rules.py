"""Contradictions, old spellings, values without effect, unknown names, unavailable features."""

from typing import Any

import pytest

from deepspeed.config import parse
from deepspeed.config.deprecated import OLD_KEYS
from deepspeed.config.messages import dotted
from deepspeed.config.parsing import value_at
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.config.suggest import CONFUSIONS, SYNONYMS, WRAPPERS, declared_paths
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.missing_features import FEATURES
from tests.config.support import nest, only_problem, problems, read


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "gradient_allreduce_op"),
        ({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 17}}, "fp16.min_loss_scale"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params.nesterov"),
        ({"optimizer": {"type": "SGD", "params": {"foreach": 1, "fused": 1}}}, "optimizer.params.fused"),
        ({"elasticity": {"version": 0.15}}, "elasticity.version"),
        ({"elasticity": {"min_gpus": 5, "max_gpus": 3}}, "elasticity.min_gpus"),
        ({"autotuning": {"results_dir": ""}}, "autotuning.results_dir"),
        ({"expert_parallel": {"expert_w1": "a.b"}}, "expert_parallel.expert_w1"),
        ({"expert_parallel": {"load_balance_coeff": 0}}, "expert_parallel.load_balance_coeff"),
        (
            {
                "tensor_parallel": {"autotp_size": 2, "sequence_parallel_norms": True},
                "sequence_parallel": {"tiled_mlp": True},
            },
            "tensor_parallel.sequence_parallel_norms",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"ratio": 0.5}}},
            "zero_optimization.offload_optimizer.ratio",
        ),
    ],
)
def test_contradictions_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    assert only_problem(config).startswith(f"{name}: ")


def _compressed(start: int, target: int, period: int) -> dict[str, Any]:
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    shared = {"enabled": True, "quantize_weight_in_forward": False}
    groups = {"all": {"params": params}}
    return {"compression_training": {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}}


def _quantized(start: int, target: int, period: int) -> dict[str, Any]:
    schedule = {"quantize_period": period}
    bits = {"start_bits": start, "target_bits": target}
    return {"quantize_training": {"enabled": True, "quantize_bits": bits, "quantize_schedule": schedule}}


@pytest.mark.parametrize("section", [_compressed, _quantized])
def test_a_period_of_0_needs_equal_bits(section: Any) -> None:
    """Published configurations write 0 where no bits fall."""
    read(section(8, 8, 0))
    read(section(8, 4, 1))
    assert "period: 0: expected at least 1 step, as bits fall from 8 to 4" in only_problem(section(8, 4, 0))
    assert any("period: expected an integer >= 0" in problem for problem in problems(section(8, 8, -1)))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameter_offload_has_no_effect_below_stage_3(device: str, stage: int) -> None:
    parsed = read({"zero_optimization": {"stage": stage, "offload_param": {"device": device, "buffer_count": 7}}})
    assert parsed.root.zero_optimization.offload_param is None
    (line,) = parsed.notices
    assert line.startswith("zero_optimization.offload_param has no effect: ") and f"is {stage};" in line


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_nvme_needs_a_path(section: str) -> None:
    found = problems({"zero_optimization": {"stage": 3, section: {"device": "nvme"}}})
    assert any(f"zero_optimization.{section}.nvme_path" in each for each in found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_on_nvme_from_stage_1_on(stage: int) -> None:
    section = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    assert read({"zero_optimization": section}).notices == []


def test_device_none_is_accepted_at_every_stage() -> None:
    for stage in range(4):
        sections = {name: {"device": "none", "nvme_path": None} for name in ("offload_param", "offload_optimizer")}
        assert read({"zero_optimization": {"stage": stage, **sections}}).notices == []


def test_all_problems_come_together_in_the_order_of_the_file() -> None:
    found = problems(
        {
            "train_batch_size": 30,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimisation": {},
            "zero_optimization": {"stage": 5, "reduce_bucket_size": -1, "bucket": 2},
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adan"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}},
        },
        dp_world_size=4,
    )
    assert [each.partition(":")[0] for each in found] == [
        "train_batch_size",
        "zero_optimisation",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.bucket",
        "bf16.enabled",
        "optimizer.type",
        "scheduler.params.warmup_steps",
    ]


def test_a_refused_value_has_no_echo() -> None:
    """A rule about the stage stays silent where the stage itself was refused."""
    section = {"stage": "abc", "offload_optimizer": {"ratio": 0.5}, "stage3_max_live_parameters": 5}
    assert only_problem({"zero_optimization": section}).startswith("zero_optimization.stage: ")


# Unknown keys.


@pytest.mark.parametrize(("wrong", "meant"), CONFUSIONS.items())
def test_known_confusions_get_advice(wrong: str, meant: str) -> None:
    if wrong.startswith("optimizer.params"):
        config: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {wrong.rsplit(".", 1)[-1]: 1}}}
    else:
        config = nest(tuple(wrong.split(".")), 1)
    assert only_problem(config) == f'{wrong}: unknown key; did you mean "{meant}"?'
    assert meant in declared_paths() or meant.startswith("optimizer.params.")


def test_messages_of_other_libraries_lead_to_existing_keys() -> None:
    params = {"optimizer.params": {"lr", "betas", "eps", "weight_decay"}}
    params["scheduler.params"] = {
        "warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr", "cos_min_ratio",
    }  # fmt: skip
    for name, targets in SYNONYMS.items():
        assert name == name.lower() and name not in declared_paths(), f"{name} is a key itself"
        for target in targets:
            section, _, key = target.partition("|")[0].rpartition(".")
            assert key in params[section] if section in params else f"{section}.{key}".lstrip(".") in declared_paths()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, 'did you mean "optimizer.params.lr"?'),
        ({"learning_rate": 1}, 'did you mean "optimizer.params.lr"?'),
        ({"optimizer": {"type": "AdamW", "params": {"wd": 1}}}, 'did you mean "optimizer.params.weight_decay"?'),
        ({"optimizer": {"type": "AdamW", "params": {"beta1": 1}}}, '"optimizer.params.betas", its first number?'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"num_warmup_steps": 9}}},
            'did you mean "scheduler.params.warmup_num_steps"?',
        ),
        ({"zero_optimization": {"max_grad_norm": 1}}, 'did you mean "gradient_clipping"?'),
        ({"Mixed_Precision": "bf16"}, 'did you mean "bf16", fp16 or torch_autocast?'),
        ({"pp_size": 2}, 'did you mean "pipeline.stages"; the program gives it, as PipelineModule(num_stages=...)?'),
        # what the class in use does not have is not suggested
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "beta1": 1}}}, "the closest valid key"),
    ],
)
def test_names_of_other_libraries(config: dict[str, Any], words: str) -> None:
    assert words in only_problem(config)


FOREIGN = {"log": {}, "cuda_visible_devices": 0, "seed": 1, "num-layers": 2, "train-iters": 9, "my_section": {"a": 1}}


@pytest.mark.parametrize("name", [*WRAPPERS, *FOREIGN])
def test_what_other_programs_keep_at_the_top_level_is_one_warning(name: str) -> None:
    (line,) = read({name: FOREIGN.get(name, {})}).warnings
    assert line.startswith(f"{name} is ignored: no key of this package has such a name.")


def test_all_keys_of_other_programs_are_one_line() -> None:
    (line,) = read(FOREIGN).warnings
    assert line.startswith("log, cuda_visible_devices, seed, num-layers, train-iters, my_section are ignored: ")


@pytest.mark.parametrize(
    "name", ["lr", "betas", "warmup_max_lr", "stage", "train-batch-size", "autotp_size", "max_grad_norm", "schedule"]
)
def test_what_may_be_meant_for_this_package_is_refused_at_the_top_level(name: str) -> None:
    assert only_problem({name: 1}).startswith(f"{name}: unknown key; ")


def test_a_key_of_another_section_is_found_there() -> None:
    assert 'did you mean "zero_optimization.stage"?' in only_problem({"stage": 2})
    assert 'did you mean "train_batch_size"?' in only_problem({"zero_optimization": {"train_batch_size": 2}})


def test_comments_at_every_level() -> None:
    config = {
        "_": 1,
        "_fp16": {"x": 1},
        "fp16": {"_why": "-"},
        "comment": "-",
        "optimizer": {"type": "Adam", "params": {"_a": 1}},
    }
    parsed = read(config)
    assert parsed.notices == [] and parsed.root.optimizer is not None and parsed.root.optimizer.params == {}


def test_warnings_instead_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_UNKNOWN_CONFIG_KEYS", "warn")
    parsed = read({"stage": 1, "fp16": {"enabld": 1}, "optimizer": {"type": "Adam", "params": {"lrr": 1}}})
    assert len(parsed.notices) == 3
    assert all("is not a known key and is ignored" in line for line in parsed.notices)
    assert only_problem({"fp16": {"enabld": 1, "enabled": "abc"}}).startswith("fp16.enabled: ")


def test_dotted_keys_that_spell_a_path_mean_nothing() -> None:
    parsed = read({"zero_optimization.reduce_bucket_size": 5})
    assert parsed.root.zero_optimization.reduce_bucket_size == 500_000_000
    assert len(parsed.notices) == 1 and "must be written as nested objects" in parsed.notices[0]
    assert only_problem({"zero_optimization.reduce_buckt_size": 5}).startswith("zero_optimization.reduce_buckt_size: ")


# Old spellings.

OLD_VALUES: dict[str, Any] = {
    "bfloat16": {"enabled": True},
    "seq_parallel_comm_data_type": "bf16",
    "aio.thread_count": 4,
    "data_types.grad_accum_type": "bf16",
    "gradient_accumulation_dtype": "bf16",
    "zero_optimization.allgather_size": 1000,
    "bf16.check_overflow": False,
    "elasticity.prefer_large_batch": False,
    "optimizer.params.max_grad_norm": 2,
}


@pytest.mark.parametrize("entry", OLD_KEYS, ids=lambda entry: dotted(entry.old))
def test_old_names_are_translated_with_one_line(entry: Any) -> None:
    name = dotted(entry.old)
    value = OLD_VALUES.get(name, True)
    config = nest(entry.old, value)
    if name.startswith("zero_optimization.") and isinstance(config["zero_optimization"], dict):
        config["zero_optimization"]["stage"] = 3 if "cpu_offload_param" in name else 0
    if name == "optimizer.params.max_grad_norm":
        config["optimizer"]["type"] = "Adam"
    parsed = read(config)
    renamed = [line for line in parsed.notices if line.startswith(f"{name} is an old name of ")]
    assert len(renamed) == 1
    for path in entry.new:
        assert value_at(parsed.root, path) != value_at(Root(), path)


@pytest.mark.parametrize("value", [{"adam_w_mode": True}, {"torch_adam": False}, {"lr": 0.5}])
def test_arguments_beside_params_with_the_value_in_use_are_one_line(value: dict[str, Any]) -> None:
    """The original package ignores them there; BEiT's files have adam_w_mode."""
    (name,) = value
    (line,) = read({"optimizer": {"type": "adam", "params": {"lr": 0.5}, **value}}).notices
    assert line.startswith(f"optimizer.{name} has no effect beside optimizer.params")


@pytest.mark.parametrize("value", [{"adam_w_mode": False}, {"torch_adam": True}, {"lr": 0.1}, {"weight_decay": 0.1}])
def test_arguments_beside_params_with_another_value_are_refused(value: dict[str, Any]) -> None:
    (name,) = value
    text = only_problem({"optimizer": {"type": "Adam", "params": {"lr": 0.5}, **value}})
    assert text == f'optimizer.{name}: unknown key; did you mean "optimizer.params.{name}"?'


@pytest.mark.parametrize("entry", OLD_KEYS, ids=lambda entry: dotted(entry.old))
def test_old_names_refuse_what_they_could_not_hold(entry: Any) -> None:
    config = nest(entry.old, "abc")
    if dotted(entry.old) == "optimizer.params.max_grad_norm":
        config["optimizer"]["type"] = "Adam"
    assert only_problem(config).startswith(f"{dotted(entry.old)}: expected ")


@pytest.mark.parametrize("entry", OLD_KEYS, ids=lambda entry: dotted(entry.old))
def test_an_old_name_beside_the_new_one_is_refused(entry: Any) -> None:
    from deepspeed.config.deprecated import _place

    name = dotted(entry.old)
    config = nest(entry.old, OLD_VALUES.get(name, True))
    _place(config, entry.new[0], {"device": "none"} if "offload" in name and "pipeline" not in name else None)
    found = problems(config)
    assert found[0].startswith(f"{name}: ") and "together with" in found[0]


def test_old_names_with_the_default_value_get_no_notice() -> None:
    config = {
        "zero_optimization": {"cpu_offload": False, "stage3_gather_fp16_weights_on_model_save": False},
        "aio": {"thread_count": 1},
        "bfloat16": {"enabled": False},
        "fp32_allreduce": False,
        "optimizer": {"type": "Lamb", "params": {"max_grad_norm": 0}},
    }
    assert read(config).notices == []


def test_the_bool_form_of_zero() -> None:
    parsed = read({"zero_optimization": True, "allgather_size": 1000})
    assert parsed.root.zero_optimization.stage == 1
    assert parsed.root.zero_optimization.allgather_bucket_size == 1000
    assert len(parsed.notices) == 2
    assert read({"zero_optimization": False}).notices == []
    assert "allgather_size has no effect" in read({"allgather_size": 1000}).notices[0]
    assert only_problem({"allgather_size": -1}).startswith("allgather_size: expected an integer > 0")


def test_stage_3_keys_without_their_prefix() -> None:
    section = read({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7, "max_live_parameters": 9}})
    assert section.root.zero_optimization.stage3_prefetch_bucket_size == 7
    assert section.notices == []
    both = {"stage": 3, "prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 7}
    assert "keep one of them" in only_problem({"zero_optimization": both})
    assert only_problem({"zero_optimization": {"max_live_parameters": -1}}).startswith(
        "zero_optimization.max_live_parameters: "
    )


def test_sections_built_by_a_program_accept_both_spellings() -> None:
    section = ZeroOptimization(stage="3", prefetch_bucket_size=7, offload_param={"device": "CPU"})
    assert section.stage3_prefetch_bucket_size == section.prefetch_bucket_size == 7
    assert section.offload_param is not None and section.offload_param.device == "cpu"
    with pytest.raises(AttributeError):
        _ = section.prefetch_bucket_siz
    with pytest.raises(ValueError, match="prefetch_bucket_size is another spelling of stage3_prefetch_bucket_size"):
        ZeroOptimization(prefetch_bucket_size=7, stage3_prefetch_bucket_size=8)
    with pytest.raises(ValueError, match="reduce_buckt_size"):
        ZeroOptimization(reduce_buckt_size=7)


# Values without effect.


def sampled(section: dict[str, Any]) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, "data_sampling": section}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"zero_optimization": {"contiguous_gradients": False}},
            "zero_optimization.contiguous_gradients has no effect",
        ),
        ({"disable_allgather": True}, "disable_allgather has no effect"),
        ({"fp16": {"loss_scale_window": 5}}, "fp16.loss_scale_window has no effect: fp16.enabled is false"),
        ({"bf16": {"enabled": True, "loss_scale": 8}}, "bf16.loss_scale has no effect: bf16 has the exponent range"),
        ({"tensorboard": {"job_name": "a"}}, "tensorboard.job_name has no effect: tensorboard.enabled is false"),
        ({"flops_profiler": {"start_step": 3}}, "flops_profiler.start_step has no effect: one step is profiled"),
        ({"compile": {"backend": "inductor"}}, "compile.backend has no effect: compile.enabled is false"),
        ({"gradient_clipping": 0}, "gradient_clipping: 0 switches clipping off"),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2}, "gradient_predivide_factor has no effect"),
        ({"zero_optimization": {"cpu_offload_use_pin_memory": True}}, "cpu_offload_use_pin_memory has no effect"),
        (
            {"aio": {"queue_depth": 4, "block_size": 5}},
            "aio.block_size, aio.queue_depth have no effect: nothing is offl",
        ),
        ({"zero_optimization": {"grad_hooks": False}}, "zero_optimization.grad_hooks has no effect"),
        (
            {"tensor_parallel": {"autotp_size": 1, "preset_model": "llama", "tp": {"tp_grain_size": 2}}},
            "tensor_parallel.preset_model have no effect: tensor_parallel.autotp_size is 1",
        ),
        (
            {
                "compression_training": {
                    "sparse_pruning": {"different_groups": {"all": {"params": {"dense_ratio": 0.5}}}}
                }
            },
            "compression_training.sparse_pruning.shared_parameters.enabled is false",
        ),
        ({"pipeline": {"grad_partitioned": False}}, "pipeline.grad_partitioned has no effect: each tensor-"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 0.5}}},
            "cpuadam_cores_perc has no effect: the update runs in the rank's own process",
        ),
        ({"weight_quantization": {}}, "weight_quantization has no effect: neither quantized_initialization nor"),
        (
            {"weight_quantization": {"num_bits": 4, "post_init_quant": {"mlp": {"num_bits": 4}}}},
            "weight_quantization.num_bits has no effect: quantized_initialization and post_init_quant say how",
        ),
        (
            sampled({"num_workers": 2, "dynamic_batching": {"enabled": True, "max_tokens": 9, "min_batch_size": 2}}),
            "data_efficiency.data_sampling.num_workers has no effect: data_efficiency.data_sampling.enabled is false",
        ),
        (
            sampled({"num_workers": 2, "dynamic_batching": {"max_tokens": 9}}),
            "data_sampling.num_workers, data_efficiency.data_sampling.dynamic_batching.max_tokens have no effect",
        ),
    ],
)
def test_a_value_without_effect_gets_one_line(config: dict[str, Any], words: str) -> None:
    notices = read(config).notices
    assert len(notices) == 1 and words in notices[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_3_keys_at_lower_stages_share_one_line(stage: int) -> None:
    section = {
        "stage": stage,
        "stage3_prefetch_bucket_size": 5,
        "stage3_max_live_parameters": 6,
        "leaf_module": {"names": ["a"]},
    }
    notices = read({"zero_optimization": section}).notices
    assert len(notices) == 1
    assert all(
        name in notices[0] for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "leaf_module")
    )


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_optimizer_offload_at_stage_0_is_one_line(device: str) -> None:
    notices = read({"zero_optimization": {"offload_optimizer": {"device": device, "pin_memory": False}}}).notices
    assert len(notices) == 1 and "nothing is sharded or offloaded" in notices[0]


# Groups of ranks that share parameters.


@pytest.mark.parametrize(
    ("section", "ranks", "words"),
    [
        ({"zero_hpz_partition_size": 3}, 4, "zero_hpz_partition_size: 3 does not divide .* 4; 2, 4 would"),
        ({"mics_shard_size": 3}, 4, "mics_shard_size: 3 does not divide .* 4; 2, 4 would"),
        ({"mics_shard_size": 8}, 4, "mics_shard_size: 8 does not divide"),
        ({"mics_shard_size": 1}, 2, "stage 0"),
        ({"mics_shard_size": 2, "zero_hpz_partition_size": 2}, 4, "keep one"),
        ({"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}, 4, "offload_param.device"),
        ({"mics_shard_size": 2, "offload_param": {"device": "cpu"}}, 4, "offload_param.device"),
    ],
)
def test_groups_that_do_not_fit_are_refused(section: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=words):
        parse({"train_batch_size": 8, "zero_optimization": {"stage": 3, **section}}, dp_world_size=ranks)


def test_groups_that_fit_and_those_without_effect() -> None:
    for size in (0, 1, 2, 4, 8):
        config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
        found = parse(config, dp_world_size=4)
        assert found.notices == found.warnings and len(found.warnings) == (size == 8)
    config["zero_optimization"] = {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True}
    assert parse(config, dp_world_size=4).notices == []
    del config["zero_optimization"]["mics_shard_size"]
    (notice,) = parse(config, dp_world_size=4).notices
    assert notice.startswith("zero_optimization.mics_hierarchical_params_gather has no effect: ")
    assert notice.endswith("zero_optimization.mics_shard_size is off")
    config["zero_optimization"] = {"stage": 2, "mics_shard_size": 3}
    (notice,) = parse(config, dp_world_size=4).notices
    assert "only stage 3 uses that" in notice


def test_the_writer_of_checkpoints() -> None:
    found = read({"checkpoint": {"writer": {"io_buffer_size": 1024, "data_parallel": "socket", "decoupled": True}}})
    assert [notice.partition(" has no effect")[0] for notice in found.notices] == [
        "checkpoint.writer.io_buffer_size",
        "checkpoint.writer.data_parallel",
    ]
    assert read({"checkpoint": {"writer": {}}}).notices == []
    (problem,) = problems({"checkpoint": {"writer": {"type": "mock"}}})
    assert 'checkpoint.writer.type: found "mock", which writes nothing' in problem


# Features that do not exist yet.

SWITCHED_ON: dict[str, Any] = {
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.zenflow": {},
    "sequence_parallel_size": 2,
    "expert_parallel.comm_backend": "deepep",
    "datastates_ckpt": {},
    "compile.passes": ["autosp"],
}


KEYS = [(feature, key) for feature in FEATURES for key in feature.keys]


@pytest.mark.parametrize(("feature", "key"), KEYS, ids=[key.name for _, key in KEYS])
def test_a_missing_feature_is_refused_when_enabled_and_accepted_when_not(feature: Any, key: Any) -> None:
    value = SWITCHED_ON.get(key.name, True)
    config = nest(key.path, value)
    config.setdefault("zero_optimization", {}).setdefault("stage", 3)
    refusals = [each for each in problems(config) if "does not exist here yet" in each]
    assert len(refusals) == 1 and refusals[0].startswith(f"{key.name}: {feature.heading}")
    assert refusals[0].endswith(f"; {key.off}. {feature.instead}")
    default = value_at(Root(), key.path)
    if default is not None:
        off = nest(key.path, default)
        assert read(off).notices == []
    elif key.name.endswith(".enabled"):
        assert read(nest(key.path, False)).notices == []


def test_the_keys_of_missing_features_exist_and_occur_once() -> None:
    names = [key.name for _, key in KEYS]
    assert names and len(names) == len(set(names))
    assert set(names) <= set(declared_paths())


def test_presence_forms() -> None:
    assert read({"datastates_ckpt": False}).root.datastates_ckpt is None
    assert only_problem({"datastates_ckpt": True}).startswith("datastates_ckpt: ")
    assert read({"weight_quantization": {"enabled": False}}).notices == []


def test_zero_init_reads_only_its_sections() -> None:
    config = {
        "train_batch_size": "auto",
        "optimizer": {"params": {"lr": "auto"}},
        "anything": 1,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 9},
    }
    parsed = parse(config, purpose="zero_init")
    assert parsed.batch is None and parsed.root.zero_optimization.stage3_prefetch_bucket_size == 9
    assert parsed.notices == [
        'bf16.enabled: "auto" became false',
        'zero_optimization.reduce_bucket_size: "auto" became 500000000',
    ]
    config["zero_optimization"] = {"stge": 3}
    assert only_problem(config, batch=False, purpose="zero_init").startswith("zero_optimization.stge: unknown key")


@pytest.mark.parametrize(
    ("given", "limit", "line"), [(True, 1.0, "it means 1.0"), (False, 0.0, "switches clipping off")]
)
def test_clipping_as_a_switch_is_a_number(given: bool, limit: float, line: str) -> None:
    parsed = read({"gradient_clipping": given})
    assert parsed.root.gradient_clipping == limit
    assert len(parsed.notices) == 1 and parsed.notices[0].startswith("gradient_clipping: ")
    assert line in parsed.notices[0]
