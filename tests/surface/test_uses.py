"""Uses names at upstream's paths as training programs use them."""

import inspect
import subprocess
import sys
import zipfile
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

import deepspeed
from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.errors import NotYetSupportedError
from tests.harness import run_ranks

FIXTURES = Path(__file__).resolve().parents[1] / "checkpoint" / "fixtures"


# -- versions and what is there ----------------------------------------------------------------------------------------


def test_version_of_torch():
    from deepspeed.git_version_info import torch_info
    from deepspeed.utils.torch import required_torch_version

    assert Version("2.11") <= Version(torch_info["version"]) <= Version(torch.__version__)
    assert {name: Version(torch_info[name]) for name in ("cuda_version", "hip_version")}
    assert required_torch_version(min_version=2.4) and not required_torch_version(max_version="2.10")
    exact = torch.__version__.split("+")[0]
    assert required_torch_version(min_version=exact, max_version=exact)
    assert not required_torch_version(min_version="99.0")
    with pytest.raises(ValueError, match="give min_version"):
        required_torch_version()


def test_operators_that_a_program_may_count_on():
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import compatible_ops, installed_ops
    from deepspeed.ops.op_builder import CPUAdamBuilder, GDSBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME] and installed_ops.get("fused_adam")
    assert compatible_ops["async_io"] and not compatible_ops["gds"] and not GDSBuilder().is_compatible()
    for name, builder in ALL_OPS.items():
        assert name == builder.NAME and builder.is_compatible() == deepspeed.ops.__compatible_ops__[name]
    assert CPUAdamBuilder().load().DeepSpeedCPUAdam([nn.Parameter(torch.ones(1))])
    assert isinstance(get_accelerator().create_op_builder("CPUAdamBuilder"), CPUAdamBuilder)
    assert get_accelerator().get_op_builder("NoSuchBuilder") is None
    with pytest.raises(NotYetSupportedError, match="nothing is compiled here.*nvme"):
        GDSBuilder().load()


def test_operations_are_logged_one_by_one():
    from deepspeed.comm import comms_logger as log

    before = dict(vars(log))
    try:
        log.enabled, log.prof_all, log.prof_ops = True, False, []
        log.start_profiling_op(["all_reduce"])
        assert log.wants("all_reduce", False) and not log.wants("broadcast", False)
        log.start_profiling_comms()
        log.stop_profiling_op(["all_reduce"])
        assert not log.wants("all_reduce", False) and log.wants("broadcast", False)
        log.start_profiling_op(["all_reduce"])
        log.stop_profiling_comms()
        assert log.wants("all_reduce", False) and not log.wants("broadcast", False)
    finally:
        vars(log).update(before)


def test_the_log_by_operation_and_size():
    from deepspeed.comm import comms_logger as log
    from deepspeed.comm import has_comm_data
    from deepspeed.errors import CallOrderError

    log.comms_dict = {}
    log.add("all_reduce", 1000, 0.001, 2)
    log.add("all_reduce", 1000, 0.002, 2)
    assert has_comm_data() and list(log.comms_dict) == ["all_reduce"]
    count, times, _, bus = log.comms_dict["all_reduce"][1000]
    assert (count, times) == (2, [1.0, 2.0]) and bus[0] == pytest.approx(0.008)
    with pytest.raises(CallOrderError, match="expected an empty dict.*broadcast"):
        log.comms_dict = {"broadcast": {}}
    log.comms_dict = {}
    assert not has_comm_data() and not log.comms_dict


def test_tensors_in_one():
    from deepspeed.ops.op_builder import UtilsBuilder

    utils, tensors = UtilsBuilder().load(), [torch.arange(6.0).view(2, 3).T, torch.tensor(7.0), torch.empty(0, 2)]
    flat = utils.flatten(tensors)
    assert flat.shape == (7,)
    for found, expected in zip(utils.unflatten(flat, tensors), tensors, strict=True):
        assert torch.equal(found, expected)


def test_everything_imported_hides_no_module_of_the_program():
    from deepspeed.utils import __all__ as names

    assert "groups" in names and "logger" in names and "torch" not in names and "logging" not in names
    assert deepspeed.utils.logging.logger is deepspeed.logger


def test_batch_keys_of_a_configuration_object():
    from deepspeed.errors import DeepSpeedConfigError
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, config.train_batch_size = 4, 2, 8
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 2)
    assert config.train_batch_size == 8
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size = 0"):
        config.train_batch_size = 0


def test_environment_report(capfd):
    from deepspeed.env_report import cli_main, main

    main(hide_operator_status=True)
    assert torch.__version__ in (short := capfd.readouterr().out)
    cli_main([])
    assert len(capfd.readouterr().out) > len(short)
    assert inspect.signature(cli_main).parameters["args"].default is None  # the command line, as ds_report
    done = subprocess.run([sys.executable, "-m", "deepspeed.env_report", "--help"], capture_output=True, timeout=120)
    assert done.returncode == 0


# -- configurations ----------------------------------------------------------------------------------------------------


def test_a_schedule_spelt_with_the_constants():
    from deepspeed.runtime import lr_schedules as s

    config = {"type": s.WARMUP_LR, "params": {s.WARMUP_MAX_LR: 0.1, s.WARMUP_NUM_STEPS: 10, s.WARMUP_TYPE: "linear"}}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = getattr(s, config["type"])(optimizer, **config["params"])
    for _ in range(6):
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1 * 5 / 10)]
    classes = [s.LR_RANGE_TEST, s.ONE_CYCLE, s.WARMUP_LR, s.WARMUP_DECAY_LR, s.WARMUP_COSINE_LR]
    assert classes == s.VALID_LR_SCHEDULES
    taken = {name for each in classes for name in inspect.signature(getattr(s, each)).parameters}
    apart = {s.LR_SCHEDULE, s.WARMUP_LOG_RATE, s.WARMUP_LINEAR_RATE, *classes}
    constants = [getattr(s, name) for name in dir(s) if name.isupper()]
    spelt = {value for value in constants if isinstance(value, str) and value not in apart}
    assert len(spelt) > 20 and spelt <= taken


class Kind(Enum):
    """Of a program's own setting."""

    small = "small"


def test_a_configuration_of_a_program_of_its_own():
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_scalar_param

    class Mine(DeepSpeedConfigModel):
        """Two settings."""

        size: int = 3
        kind: Kind = Kind.small

    assert Mine(size="auto").size == 3 and Mine(size="5").size == 5 and Mine().kind == "small"
    with pytest.raises(ValueError, match="sise"):
        Mine(sise=1)
    with pytest.raises(ValueError, match="size"):
        Mine().size = "many"
    with pytest.raises(ValueError, match="size"):
        Mine(strict=True, size="auto")
    assert get_scalar_param({"a": 1}, "a", 2) == 1 and get_scalar_param({}, "a", 2) == 2


def test_deprecated_fields_of_a_configuration_of_a_program():
    from pydantic import Field

    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    def old(new: str, **more: Any) -> Any:
        return Field(None, json_schema_extra={"deprecated": True, "new_param": new, **more})

    class Inner(DeepSpeedConfigModel):
        """Settings of a section."""

        depth: int = 1

    class Mine(DeepSpeedConfigModel):
        """Settings, some under old names."""

        names: list[str] = []
        inner: Inner = Inner()
        name: str | None = old("names", new_param_fn=lambda name: [name])
        depth: int | None = old("inner.depth")
        width: int | None = old("names", set_new_param=False, deprecated_msg="Widths are measured.")

    assert Mine(name="a").names == ["a"] and Mine(depth="3").inner.depth == 3 and Mine(names=["b"]).name is None
    assert Mine(width=4).names == [] and Mine(depth=2).depth == 2
    with pytest.raises(ValueError, match=r"Mine: name is an old name of names, and both are given; leave name out"):
        Mine(name="a", names=["b"])


def test_old_spellings_where_a_program_builds_a_section_itself():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(stage=3, cpu_offload=True, stage3_gather_fp16_weights_on_model_save=True)
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    assert zero.stage3_gather_16bit_weights_on_model_save
    inner = DeepSpeedZeroConfig(stage=1, offload_optimizer={"device": "cpu", "pipeline": True}).offload_optimizer
    assert inner is not None and inner.pipeline_read and inner.pipeline_write
    with pytest.raises(ValueError, match="keep only zero_optimization.ignore_unused_parameters"):
        DeepSpeedZeroConfig(find_unused_parameters=True, ignore_unused_parameters=True)
    with pytest.raises(ValueError, match="cpu_offload: expected true or false"):
        DeepSpeedZeroConfig(cpu_offload="perhaps")


# -- pieces of programs ------------------------------------------------------------------------------------------------


def test_layers_divided_over_stages():
    from deepspeed.runtime.utils import partition_balanced, partition_uniform, prefix_sum_inc

    assert prefix_sum_inc([3, 1, 2]) == [3, 4, 6]
    assert partition_uniform(num_items=10, num_parts=4) == [0, 3, 6, 8, 10]
    assert partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_balanced(weights=[1, 1, 1, 1, 1, 1], num_parts=3) == [0, 2, 4, 6]
    assert partition_balanced([1, 1, 1, 1, 1, 1, 6], 2) == [0, 6, 7]
    assert partition_balanced([0, 1, 1, 0], 4) == [0, 1, 2, 3, 4]
    bounds = partition_balanced([5, 1, 1, 1, 1, 5], 3)
    assert max(sum([5, 1, 1, 1, 1, 5][a:b]) for a, b in pairwise(bounds)) <= 6
    with pytest.raises(ValueError, match="parts 1 or more"):
        partition_uniform(3, 0)


def test_a_layer_replaced_by_its_dotted_name():
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    assert recursive_getattr(model, "1.0.weight") is model[1][0].weight
    recursive_setattr(model, "1.0", nn.Identity())
    assert isinstance(model[1][0], nn.Identity)
    recursive_setattr(model, "0", nn.Identity())
    assert isinstance(model[0], nn.Identity)


def test_a_checkpoint_read_with_the_constants(tmp_path):
    from deepspeed.checkpoint import constants as c
    from deepspeed.checkpoint.upstream.files import load

    with zipfile.ZipFile(FIXTURES / "1-stage2-bf16.zip") as archive:
        archive.extractall(tmp_path)
    folder = next(tmp_path.rglob(f"{c.BF16_ZERO_FILE_PREFIX}*")).parent
    (file,) = folder.glob(f"{c.BF16_ZERO_FILE_PREFIX}0_{c.MODEL_FILE_PREFIX}00{c.OPTIM_FILE_SUFFIX}")
    state = load(file, trust=False)[c.OPTIMIZER_STATE_DICT]
    assert c.ZERO_STAGE in state and c.PARTITION_COUNT in state
    assert {c.SINGLE_PARTITION_OF_FP32_GROUPS, c.BASE_OPTIMIZER_STATE, c.GROUP_PADDINGS} <= state.keys()
    model = load(next(folder.glob(f"*{c.MODEL_FILE_SUFFIX}")), trust=False)
    assert {c.DS_VERSION, c.PARAM_SHAPES, c.BUFFER_NAMES} <= model.keys()


@pytest.mark.parametrize(
    ("runner", "program"),
    [
        ("PDSHRunner", "pdsh"),
        ("OpenMPIRunner", "mpirun"),
        ("MPICHRunner", "mpirun"),
        ("IMPIRunner", "mpirun"),
        ("MVAPICHRunner", "mpirun"),
        ("SlurmRunner", "srun"),
    ],
)
def test_commands_for_several_machines(runner, program):
    from deepspeed.launcher import multinode_runner
    from deepspeed.launcher.runner import encode_world_info, parse_args

    hosts = {"worker-0": [0, 1], "worker-1": [0, 1]}
    args = parse_args(["--master_addr", "worker-0", "train.py", "--depth", "3"])
    made = getattr(multinode_runner, runner)(args, encode_world_info(hosts))
    made.add_export("NCCL_DEBUG", "INFO")
    made.validate_args()
    environment: dict[str, str] = {}
    found = made.get_cmd(environment, {"worker-0": 2, "worker-1": 2})
    command = found[0] if runner == "PDSHRunner" else found
    text = " ".join([*command, *(f"{name}={value}" for name, value in environment.items())])
    assert command[0] == program and isinstance(made.backend_exists(), bool)
    assert "train.py" in text and "--depth" in text and "INFO" in text and "worker-1" in text
    if runner == "PDSHRunner":
        assert found[1][0] == "pdsh" and found[2]["PDSH_RCMD_TYPE"] == "ssh"


def test_ranks_of_this_machine_stand_for_devices(monkeypatch):
    for value, count in (("4", 4), ("", 1), ("0", 1), ("many", 1)):
        monkeypatch.setenv("LOCAL_SIZE", value)
        assert CPUAccelerator().device_count() == count
    monkeypatch.delenv("LOCAL_SIZE")
    assert CPUAccelerator().device_count() == 1


def _in_a_run() -> tuple[float, ...]:
    import deepspeed.comm.comm as dist
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.accelerator.real_accelerator import get_accelerator
    from deepspeed.runtime.constants import ROUTE_EVAL
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    assert dist.is_initialized() and dist.get_world_size() == 2
    assert isinstance(get_accelerator(), DeepSpeedAccelerator)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2))
    assert not any(is_zero_param(parameter) for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert all(is_zero_param(parameter) for parameter in engine.module.parameters())
    assert not is_zero_param(torch.ones(1)) and not is_zero_param(None)
    loader = engine.deepspeed_io([torch.ones(512)] * 4, batch_size=1, route=ROUTE_EVAL)
    for _ in loader:
        engine.tput_timer.start()
        engine.tput_timer.stop(global_step=True)
    engine.tput_timer.update_epoch_count()
    return len(loader), engine.tput_timer.epoch_count, engine.tput_timer.global_step_count


def test_what_programs_read_in_a_run():
    assert run_ranks(_in_a_run, 2) == [(2, 1, 2)] * 2


def test_a_program_that_mentions_features_starts():
    """The imports at the top of programs whose features are switched off."""
    code = """
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.elasticity import compute_elastic_config
from deepspeed.ops.transformer import DeepSpeedTransformerLayer
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
"""
    exec(code, {})
