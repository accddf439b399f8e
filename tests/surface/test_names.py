"""Public names exist at the paths from which other libraries import them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest


def _names_of_programs() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("names_of_programs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[module] += line.split()  # noqa: F821  # a module's names go on
        elif not line.startswith("#"):
            module, _, names = line.partition(":")
            found[module] = names.split()
    return found


def test_names_that_public_programs_import():
    lacking = []
    for module, names in _names_of_programs().items():
        for name in names or [""]:
            statement = f"from {module} import {name}" if name else f"import {module}"
            found: dict[str, object] = {name: module}
            try:
                exec(statement, found)
            except ImportError as error:
                lacking.append(f"{statement}: {error}")
            if found[name] is None:
                lacking.append(f"{statement}: None")
    assert not lacking, "\n".join(lacking)


# Attribute walks from a bare `import deepspeed`, each in the same fresh process but before anything imported its parts.
WALKS = """
deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
deepspeed.utils.logging.logger
deepspeed.zero
deepspeed.checkpointing.configure
deepspeed.comm.get_rank
deepspeed.utils.groups._get_data_parallel_group
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
deepspeed.runtime.base_optimizer.DeepSpeedOptimizer
deepspeed.ops.adam.DeepSpeedCPUAdam
deepspeed.accelerator.get_accelerator
deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint
deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
deepspeed.moe.layer.MoE
deepspeed.pipe.PipelineModule
deepspeed.profiling.flops_profiler.get_model_profile
deepspeed.DeepSpeedEngine
deepspeed.checkpoint.utils.clone_tensors_for_torch_save
""".split()


def test_attribute_walks_after_a_bare_import():
    code = "import deepspeed\n" + "\n".join(WALKS)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_same_objects_at_both_paths():
    import deepspeed
    from deepspeed import comm, engine, schedulers
    from deepspeed.runtime import base_optimizer, lr_schedules
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert deepspeed.DeepSpeedEngine is DeepSpeedEngine is engine.DeepSpeedEngine
    assert deepspeed.DeepSpeedOptimizer is base_optimizer.DeepSpeedOptimizer
    assert deepspeed.init_distributed is comm.init_distributed
    assert deepspeed.checkpointing is checkpointing
    assert lr_schedules.WarmupLR is schedulers.WarmupLR
    assert issubclass(base_optimizer.ZeROOptimizer, base_optimizer.DeepSpeedOptimizer)


def test_modules_that_are_commands():
    def run(path):
        command = [sys.executable, "-m", path, "--help"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("deepspeed.utils.zero_to_fp32")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m deepspeed.utils.zero_to_fp32")
    done = run("deepspeed.utils.zero_to_torch")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m deepspeed.utils.zero_to_torch")


def test_groups_is_one_module_with_one_mpu():
    import deepspeed.utils.groups as by_import
    from deepspeed.comm.job import groups
    from deepspeed.utils import groups as by_attribute

    assert by_import is by_attribute is groups


def test_z3_leaf_module_is_function_and_submodule():
    code = "from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules\nimport deepspeed.utils.z3_leaf_module\n"
    code += "import deepspeed; assert callable(deepspeed.utils.z3_leaf_module), deepspeed.utils.z3_leaf_module"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_dist_is_there_once_there_is_a_group():
    import torch.distributed as torch_dist

    import deepspeed

    assert deepspeed.dist is None
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        assert deepspeed.dist is deepspeed.comm
    finally:
        torch_dist.destroy_process_group()
    assert deepspeed.dist is None


def test_unknown_names_are_attribute_errors():
    import deepspeed

    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute 'initialise'"):
        _ = deepspeed.initialise
    with pytest.raises(ImportError, match="no_such_thing"):
        exec("from deepspeed.runtime.zero import no_such_thing")
    assert "initialize" in dir(deepspeed) and "PipelineModule" in dir(deepspeed.pipe)


def test_version_parts():
    import deepspeed

    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, parts)) == deepspeed.__version__.partition("+")[0]
    assert deepspeed.__version__ == deepspeed.version


@pytest.mark.parametrize("module", ["deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.zero"])
def test_everything_announced_is_there(module):
    loaded = importlib.import_module(module)
    missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
    assert not missing
