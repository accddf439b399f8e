"""How the Hugging Face libraries find the package, and what they reach from the plain ``import deepspeed``."""

import importlib.metadata
import subprocess
import sys

from tests.ecosystem.support import needs_transformers

pytestmark = needs_transformers

# The libraries import the package and nothing else before they use these.
WALKS = [
    "DeepSpeedEngine", "initialize", "init_distributed", "tp_model_init", "zero.Init", "zero.GatheredParameters",
    "zero.register_external_parameter", "checkpointing.configure", "comm.get_rank", "comm.init_distributed",
    "runtime.lr_schedules.VALID_LR_SCHEDULES", "utils.logging.logger.setLevel", "utils.logger.setLevel",
    "utils.safe_get_full_grad", "utils.set_z3_leaf_modules", "runtime.zero.partition_parameters.ZeroParamStatus",
    "checkpoint.utils.clone_tensors_for_torch_save", "ops.adam.DeepSpeedCPUAdam", "ops.adagrad.DeepSpeedCPUAdagrad",
    "ops.lion.DeepSpeedCPULion", "runtime.base_optimizer.DeepSpeedOptimizer", "accelerator.get_accelerator",
    "runtime.zero.partition_parameters._orig_torch_arange",
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor", "runtime.engine.DeepSpeedEngine",
    "runtime.zero.partition_parameters.get_accelerator", "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
]  # fmt: skip

SCRIPT = """
import sys
import deepspeed
for walk in sys.argv[1:]:
    found = deepspeed
    for name in walk.split("."):
        found = getattr(found, name)
"""


def test_the_libraries_find_the_package():
    from accelerate.utils import compare_versions
    from accelerate.utils.imports import is_deepspeed_available
    from transformers.dependency_versions_check import dep_version_check
    from transformers.integrations.deepspeed import is_deepspeed_available as transformers_finds_it

    import deepspeed

    assert is_deepspeed_available() and transformers_finds_it()
    dep_version_check("deepspeed")
    installed = importlib.metadata.version("deepspeed")  # of a checkout: with the commit at its installation
    assert installed.partition("+")[0] == deepspeed.__version__.partition("+")[0]
    assert compare_versions("deepspeed", ">=", "0.18.6")


def test_attributes_are_there_after_the_plain_import():
    done = subprocess.run([sys.executable, "-c", SCRIPT, *WALKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "", done.stderr
