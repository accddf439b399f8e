"""DeepSpeed: train models far larger than one device holds.

::

    import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

All names are imported at first use, so that ``import deepspeed`` is fast.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec
from types import ModuleType

from deepspeed.lazy import TYPE_CHECKING, lazy_names
from deepspeed.logging import log_dist as log_dist
from deepspeed.logging import logger as logger
from deepspeed.release import BRANCH, COMMIT, RELEASE, VERSION

version = __version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in RELEASE.split("."))
__git_hash__ = git_hash = COMMIT
__git_branch__ = git_branch = BRANCH

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
MUON_OPTIMIZER = "muon"

if TYPE_CHECKING:
    from deepspeed import accelerator as accelerator
    from deepspeed import activation_checkpointing as activation_checkpointing
    from deepspeed import autotuning as autotuning
    from deepspeed import checkpoint as checkpoint
    from deepspeed import cli as cli
    from deepspeed import comm as comm
    from deepspeed import compile as compile
    from deepspeed import compression as compression
    from deepspeed import config as config
    from deepspeed import constants as constants
    from deepspeed import data as data
    from deepspeed import datastates as datastates
    from deepspeed import dropping as dropping
    from deepspeed import elasticity as elasticity
    from deepspeed import engine as engine
    from deepspeed import env_report as env_report
    from deepspeed import errors as errors
    from deepspeed import features as features
    from deepspeed import git_version_info as git_version_info
    from deepspeed import inference as inference
    from deepspeed import io as io
    from deepspeed import launcher as launcher
    from deepspeed import linear as linear
    from deepspeed import model_implementations as model_implementations
    from deepspeed import module_inject as module_inject
    from deepspeed import moe as moe
    from deepspeed import monitor as monitor
    from deepspeed import nebula as nebula
    from deepspeed import ops as ops
    from deepspeed import pipe as pipe
    from deepspeed import plan as plan
    from deepspeed import precision as precision
    from deepspeed import profiling as profiling
    from deepspeed import runtime as runtime
    from deepspeed import schedulers as schedulers
    from deepspeed import sequence as sequence
    from deepspeed import utils as utils
    from deepspeed import zero as zero
    from deepspeed.accelerator import get_accelerator as get_accelerator
    from deepspeed.activation_checkpointing import checkpointing as checkpointing
    from deepspeed.comm import init_distributed as init_distributed
    from deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
    from deepspeed.config import load_ds_config as load_ds_config
    from deepspeed.data import DeepSpeedDataLoader as DeepSpeedDataLoader
    from deepspeed.dropping import progressive_layer_drop as progressive_layer_drop
    from deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.engine import DeepSpeedOptimizer as DeepSpeedOptimizer
    from deepspeed.engine import add_config_arguments as add_config_arguments
    from deepspeed.engine.hybrid import DeepSpeedHybridEngine as DeepSpeedHybridEngine
    from deepspeed.engine.initialize import initialize as initialize
    from deepspeed.engine.parts import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
    from deepspeed.engine.parts import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable
    from deepspeed.engine.pipeline import DualPipeVEngine as DualPipeVEngine
    from deepspeed.engine.pipeline import PipelineEngine as PipelineEngine
    from deepspeed.errors import DeepSpeedConfigError as DeepSpeedConfigError
    from deepspeed.inference import default_inference_config as default_inference_config
    from deepspeed.inference import init_inference as init_inference
    from deepspeed.inference.config import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
    from deepspeed.inference.engine import InferenceEngine as InferenceEngine
    from deepspeed.module_inject import replace_transformer_layer as replace_transformer_layer  # type: ignore[attr-defined]
    from deepspeed.ops.muon import set_optimizer_flags as set_optimizer_flags
    from deepspeed.parallel.tensor.request import set_autotp_mode as set_autotp_mode
    from deepspeed.parallel.tensor.request import tp_model_init as tp_model_init
    from deepspeed.pipe import DualPipeVModule as DualPipeVModule
    from deepspeed.pipe import PipelineModule as PipelineModule
    from deepspeed.precision.on_device import OnDevice as OnDevice

    HAS_TRITON: bool
    dist: ModuleType | None


def _initialized_comm() -> ModuleType | None:
    """Returns ``deepspeed.comm`` if the process group is initialized, otherwise None."""
    from deepspeed import comm

    return comm if comm.is_initialized() else None


lazy_names(
    __name__,
    ("__version__", "log_dist", "logger", "version"),
    HAS_TRITON=lambda: _find_spec("triton") is not None,
    dist=_initialized_comm,
)
