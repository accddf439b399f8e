"""What initialize takes, says and refuses."""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.accelerator import cpu
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.config import parse
from deepspeed.config.sections.expert_parallel import ExpertParallel
from deepspeed.config.sections.root import Root
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.zero import runtime
from tests.engine.support import WIDTH, engine_of, inputs
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.device import simulated_device
from tests.harness.logged import logged
from tests.harness.toy_models import tower
from tests.parallel.tensor.support import adamw, llama

# Sections that would undo each other's work on ranks that share layers or sequences are refused by name.


SPARSE = {"sparse_attention": {"mode": "fixed", "block": 4, "apply_to": "model"}}
SCHEDULE = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}}
LENGTHS = {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, **SCHEDULE}}
LENGTHS["curriculum_learning"]["max_difficulty"] = 32
STEPS = {"schedule_type": "fixed_linear", "schedule_config": {"require_steps": 10, "seq_per_step": 8}}
LTD = {
    **{"enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1]},
    "random_ltd_schedule": {"min_value": 8, "max_value": 32, **STEPS},
}
TOKENS = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}}
FEW_BITS = {"weight_quantization": {"enabled": True, "quantized_initialization": {"num_bits": 8}}}

CELLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (SPARSE, {"sequence_parallel_size": 2}, r"sparse_attention.apply_to .* 2 ranks share a sequence"),
    (LENGTHS, {"sequence_parallel_size": 2}, r"curriculum_learning.curriculum_type .* cut whole sequences before"),
    (TOKENS, {"sequence_parallel_size": 2}, r"random_ltd where 2 ranks share a sequence"),
    (SPARSE, {"tensor_parallel": {"autotp_size": 2}}, r"sparse_attention.apply_to .* 2 ranks share a layer"),
    (FEW_BITS, {"tensor_parallel": {"autotp_size": 2}}, r"weight_quantization.enabled where 2 ranks share a layer"),
]


@on_ranks(2)
def test_each_is_refused_before_the_model_is_touched() -> None:
    for section, axis, words in CELLS:
        model = llama(attn_implementation="sdpa")
        before = [type(module) for module in model.modules()]
        settings = {"train_micro_batch_size_per_gpu": 2, **section, **axis}
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
        assert [type(module) for module in model.modules()] == before


# The line that an engine logs when it is made, and the warning about a dtype that the device emulates.


def _first_lines(**settings):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **settings,
    }
    with logged() as lines:
        engine, *_ = deepspeed.initialize(model=nn.Linear(16, 4), config=config)
    engine.destroy()
    return lines


def _sharding(stage, **zero):
    lines = _first_lines(zero_optimization={"stage": stage, **zero})
    return [line.split(" parameters in ")[1].split(";")[0] for line in lines if line.startswith("ZeRO stage")]


@pytest.mark.parametrize(
    ("ranks", "stage", "zero", "expected"),
    [
        (2, 2, {}, "1 bucket"),
        (1, 3, {}, "1 bucket, none sharded between uses, as no other rank shares them"),
        (2, 3, {"stage3_param_persistence_threshold": 0}, "1 bucket, all of them sharded between uses"),
        (
            2,
            3,
            {},
            "1 bucket, none sharded between uses: all are below zero_optimization.stage3_param_persistence_threshold. "
            "Lower it (0 shards everything) to save memory",
        ),
    ],
)
def test_what_is_sharded_and_why_not(ranks, stage, zero, expected):
    assert run_ranks(_sharding, ranks, stage, **zero)[0] == [expected]


@pytest.mark.parametrize("native", [True, False])
@on_ranks(1, fresh=True)
def test_fp16_that_the_processor_emulates(native):
    cpu.cpu_has_fp16 = lambda: native
    cpu.cpu_has_bf16 = lambda: True
    twice = [*_first_lines(fp16={"enabled": True}), *_first_lines(fp16={"enabled": True})]
    found = [line for line in twice if line.startswith("fp16.enabled: ")]
    assert found == (
        []
        if native
        else [
            "fp16.enabled: expected a device with fp16 instructions, found cpu, which emulates fp16: the result is "
            "right, but a step takes many times as long as in fp32. Use bf16 or fp32 here"
        ]
    )


def _notices_of_an_old_name(value):
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": value}}}
    return [line for line in parse({**config, "train_batch_size": 1}, dp_world_size=1).notices if "old name" in line]


def test_an_old_name_whose_value_stays_shows_no_value():
    assert [line.split(" is an ")[1] for line in _notices_of_an_old_name(1.0)] == ["old name of gradient_clipping"]


def _sums(steps, **settings):
    lines = _first_lines(gradient_accumulation_steps=steps, **settings)
    return [line for line in lines if "micro-batches are summed" in line]


@pytest.mark.parametrize(("stage", "share"), [(1, 1), (2, 2)])
def test_sums_wider_than_those_of_upstream_are_named(stage, share):
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    ((line,), _) = run_ranks(_sums, 2, 4, **settings)
    numel = 128 // share  # 16 * 4 and 4, each rounded up to 64
    assert line == (
        f"gradients of 4 micro-batches are summed in fp32: {4 * numel:,} bytes per rank, {2 * numel:,} more than in "
        'bf16, in which upstream sums them. data_types.grad_accum_dtype: "bf16" does that too, and loses small '
        "gradients"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 1, "bf16": {"enabled": True}},
        {"steps": 4},
        {"steps": 4, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    ],
)
def test_sums_of_the_same_size_are_not_named(settings):
    assert run_ranks(_sums, 1, **settings) == [[]]


# Forms of published configurations train what plain torch trains, whatever limit of 0 or idle section they have.


HOST = {"device": "cpu", "pin_memory": True}
FILES = {"device": "nvme", "buffer_count": 0}
FORMS = (
    {"zero_optimization": {"stage": 3, "sub_group_size": 0, "offload_optimizer": HOST}},
    {"zero_optimization": {"stage": 3, "sub_group_size": 0, "stage3_max_live_parameters": 0}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": FILES, "offload_param": FILES, "sub_group_size": 0}},
    {"zero_optimization": {"stage": 2, "allgather_bucket_size": 0}},
    *({"zero_optimization": {"stage": stage, "offload_param": HOST}} for stage in (0, 1, 2)),
    {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": False}},
    {"cuda_visible_devices": 0, "fp16": {"enabled": False, "opt_level": "O2", "hysteresis": 0}},
)


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def _trained(folder):
    weights = []
    for form in FORMS:
        zero = {
            name: {**value, "nvme_path": folder} if value is FILES else value
            for name, value in form.get("zero_optimization", {}).items()
        }
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            **form,
            "zero_optimization": zero,
        }
        model = _net()
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for step in range(3):
            torch.manual_seed(10 + step)
            engine.backward(engine(torch.randn(4, 6)).square().mean())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        engine.destroy()
    return weights


def test_every_form_trains_as_plain_torch_does(tmp_path):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(3):
        torch.manual_seed(10 + step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    wanted = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    (found,) = run_ranks(_trained, 1, str(tmp_path))
    for form, weights in zip(FORMS, found, strict=True):
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, form=form: f"{form}: {text}")


@on_ranks(1)
def test_profile_step_of_0_is_the_first_and_of_minus_1_none(tmp_path):
    """The number of profiles that were written in two steps, by ``profile_step``."""
    folder = str(tmp_path)
    counts = {}
    for step in (-1, 0, 1, 2):
        file = f"{folder}/{step}.txt"
        section = {"enabled": True, "profile_step": step, "output_file": file}
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "flops_profiler": section}
        engine, *_ = deepspeed.initialize(model=_net(), config=config)
        written = []
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 6)).mean())
            engine.step()
            try:
                with open(file) as page:
                    written.append(bool(page.read()))
            except FileNotFoundError:
                written.append(False)
        counts[step] = written
        engine.destroy()
    assert counts == {-1: [False, False], 0: [True, True], 1: [True, True], 2: [False, True]}


def _client_optimizer():
    model = _net()
    config = {"train_batch_size": 2, "optimizer": {"type": "sat.ops.FusedEmaAdam", "params": {"lr": "auto"}}}
    with logged() as lines:
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    return [line for line in lines if "has no effect" in line]


def test_a_section_beside_an_optimizer_of_the_program_is_one_line():
    ((line,),) = run_ranks(_client_optimizer, 1)
    assert "SGD is used, and the section optimizer of the configuration (sat.ops.FusedEmaAdam) has no effect" in line


# Buffers take rank 0's values, whatever their strides and dtypes; a checkpoint brings them back.


class Strided(nn.Module):
    """One buffer per kind of memory (repeated, transposed, every other element, none) and some of rare dtypes."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        values = torch.arange(start, start + 64)
        self.register_buffer("repeated", values[:WIDTH].clone()[:, None].expand(WIDTH, 5000))
        self.register_buffer("transposed", values.view(8, 8).clone().t())
        self.register_buffer("gappy", values.clone()[::2])
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("short", values[0].to(torch.int16))
        self.register_buffer("complex", torch.complex(values, values))
        self.register_buffer("conjugate", torch.complex(values, values).conj())  # a view that conjugates on reading
        self.register_buffer("negative", torch.complex(values, values).conj().imag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.repeated[:, 0]).square().mean()


@on_ranks(2)
def test_rank_0_gives_buffers_of_any_strides(tmp_path: Path) -> None:
    folder = tmp_path
    expected = dict(Strided(0.0).named_buffers())
    engine = engine_of(Strided(100.0 * dist.get_rank()), 2)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert engine.module.repeated.untyped_storage().nbytes() == 4 * WIDTH  # still one element per row
    engine.save_checkpoint(folder)
    model = engine.module
    for buffer in (model.repeated[:, :1], model.transposed, model.short, model.conjugate, model.negative):
        buffer.zero_()
    engine.load_checkpoint(folder)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    engine.backward(engine(inputs(0)))
    engine.step()


@on_ranks(2)
def test_the_first_island_gives_buffers_of_any_strides() -> None:
    expected = dict(Strided(0.0).named_buffers())
    islands = {"size": 1, "sync_every": 2}
    engine = engine_of(Strided(100.0 * dist.get_rank()), 1, communication_compression={"islands": islands})
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name


class Rotated(nn.Module):
    """Turns by angles that bf16 would round: a table in fp32, as in rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", 1 / 10_000 ** (torch.arange(WIDTH) / WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * (4_000 * self.frequencies).cos().to(x.dtype)).float().square().mean()


def train_in_bf16(stage: int) -> tuple[float, float]:
    engine = engine_of(Rotated(), stage, bf16={"enabled": True}, zero={"stage3_param_persistence_threshold": 0})
    plain = Rotated()
    plain.layer.bfloat16()
    x = inputs(0).bfloat16()
    found, expected = engine(x), plain(x)
    engine.backward(found)
    engine.step()
    assert torch.equal(engine.module.frequencies, plain.frequencies)
    engine.destroy()
    return found.item(), expected.item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_in_fp32_are_as_in_plain_torch_at_every_stage(ranks: int) -> None:
    for stage in range(4):
        for found, expected in run_ranks(train_in_bf16, ranks, stage):
            assert found == expected, stage


# What is configured and would do nothing is reported: in a warning, or in an error that names the setting.


@pytest.mark.parametrize(
    ("zero", "ranks", "words"),
    [
        ({"stage": 1, "zero_quantized_weights": True}, 2, "zero_quantized_weights has no effect: only stage 3"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, 2, "zero_hpz_partition_size has no effect: only stage 3"),
        ({"stage": 0, "mics_shard_size": 2}, 2, "mics_shard_size has no effect: only stage 3"),
        (
            {"stage": 3, "zero_hpz_partition_size": 3},
            2,
            r"partition_size 3 has no effect: .* data-parallel ranks \(2\)",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 2}, 4, None),
        ({"stage": 1, "stage3_max_live_parameters": 5}, 2, None),  # tunes stage 3: a notice is enough
    ],
)
def test_keys_of_stage_3_that_do_nothing(zero: dict[str, Any], ranks: int, words: str | None) -> None:
    found = parse({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, dp_world_size=ranks)
    assert set(found.warnings) <= set(found.notices)
    if words is None:
        assert found.warnings == []
    else:
        (line,) = found.warnings
        assert pytest.raises(AssertionError, match=words).matches(AssertionError(line)), line


def _warned() -> list[str]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    piped = PipelineModule([nn.Linear(4, 4)], topology=topology, loss_fn=nn.MSELoss())
    with logged(logging.WARNING) as texts:
        deepspeed.initialize(model=piped, config=config)[0].destroy()
        deepspeed.utils.groups.set_mesh(None)
        for section in (
            {"pipeline": {"activation_checkpoint_interval": 1}},
            {"zero_optimization": {"stage": 1, "zero_quantized_weights": True}},
        ):
            deepspeed.initialize(model=nn.Linear(4, 4), config={**config, **section})[0].destroy()
    return texts


def test_axes_and_sections_that_do_nothing() -> None:
    found, others = run_ranks(_warned, 2)
    assert others == []
    for words in (
        "2 ranks that share layers: expected tensor_parallel.autotp_size 2",
        "pipeline (activation_checkpoint_interval) has no effect: expected a deepspeed.pipe.PipelineModule, found Lin",
        "zero_optimization.zero_quantized_weights has no effect",
    ):
        assert sum(words in text for text in found) == 1, (words, found)


def test_layers_that_an_engine_would_never_drop() -> None:
    with simulated_device():
        model = tower()
        engine = engine_of(model, 1)
        with pytest.raises(CallOrderError, match=r"progressive_layer_drop\(<Tower>\): .* before initialize"):
            deepspeed.progressive_layer_drop(model, "layers")
        engine.destroy()


def test_neighbors_beside_experts_are_named() -> None:
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        with simulated_device(ranks=4):
            model = nn.Sequential(MoE(4, nn.Linear(4, 4), 4, 2))
            with pytest.raises(
                DeepSpeedConfigError, match=rf"zero_optimization.{key} 2 with expert layers of ep_size 2"
            ):
                engine_of(model, 3, zero={key: 2})


@on_ranks(2)
def test_sizes_that_do_not_divide_name_their_setting() -> None:
    mesh = JobMesh(None, (1, 2), None, default_timeout())
    over_sequence = Root(expert_parallel=ExpertParallel(enabled=True, autoep_size=2))
    assert mesh.mesh(over_sequence).size("sequence") == 2
    root = Root(expert_parallel=ExpertParallel(enabled=True, autoep_size=3))
    with pytest.raises(DeepSpeedConfigError, match=r"expert_parallel.autoep_size 3: expected a divisor of the 1 data"):
        mesh.mesh(root)


# Parameters that others replace after ``initialize``: their values are trained, or a warning is logged.


def train(engine: DeepSpeedEngine, *steps: int) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(engine(inputs(step, dist.get_rank())))
        engine.step()
    return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@on_ranks(2)
def test_values_that_were_assigned_are_trained(tmp_path: Path) -> None:
    stages = (0, 1, 2)
    folder = tmp_path
    for stage in stages:
        results = []
        for assign in (False, True):
            engine = engine_of(tower(), stage, bf16={"enabled": True})
            train(engine, 0)
            given = {name: tensor + 1 for name, tensor in engine.module.state_dict().items()}
            engine.module.load_state_dict(given, assign=assign)
            if stage == 0:  # else a forward takes them back
                engine.save_checkpoint(folder, tag=str(assign))
                assert_states_equal(dict(engine.module.state_dict()), given)
            results.append(train(engine, 1, 2))
            assert all(a is b for a, b in zip(engine.module.parameters(), engine.param_names, strict=True))
            engine.destroy()
        assert_states_equal(results[1], results[0])


@on_ranks(2)
def test_values_in_other_memory_are_trained() -> None:
    stages = (0, 1, 2)
    for stage in stages:
        results = []
        for in_place in (True, False):
            engine = engine_of(tower(), stage, bf16={"enabled": True})
            for parameter in engine.module.parameters():
                if in_place:
                    parameter.data.add_(1)
                else:
                    parameter.data = parameter.data + 1
            if in_place:  # writes through .data are not seen
                engine.optimizer.refresh_fp32_params()
            results.append(train(engine, 0, 1))
            engine.destroy()
        assert_states_equal(results[1], results[0])


@on_ranks(1)
def test_what_cannot_be_taken_back_raises() -> None:
    engine = engine_of(tower(), 0)
    engine.module.last = nn.Linear(9, 5)  # a module of its own is none of the engine's business
    engine.module.first.bias = nn.Parameter(torch.zeros(1))
    texts: list[str] = []
    with mock.patch.object(runtime, "warn_once", lambda key, message, ranks: texts.append(message)):
        engine(inputs(0))
    assert len(texts) == 1 and "'first.bias' was replaced by another one, of shape (1,)" in texts[0]
