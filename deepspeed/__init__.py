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

from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed.import_paths import children_of, install
from deepspeed.lazy import lazy_names
from deepspeed.logging import log_dist, logger
from deepspeed.release import BRANCH, COMMIT, RELEASE, VERSION

if TYPE_CHECKING:
    from deepspeed.accelerator import get_accelerator as get_accelerator
    from deepspeed.activation_checkpointing import checkpointing as checkpointing
    from deepspeed.comm import init_distributed as init_distributed
    from deepspeed.config import load_ds_config as load_ds_config
    from deepspeed.data import DeepSpeedDataLoader as DeepSpeedDataLoader
    from deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.engine import DeepSpeedOptimizer as DeepSpeedOptimizer
    from deepspeed.engine.arguments import add_config_arguments as add_config_arguments
    from deepspeed.engine.initialize import initialize as initialize
    from deepspeed.errors import DeepSpeedConfigError as DeepSpeedConfigError
    from deepspeed.precision.on_device import OnDevice as OnDevice

version = __version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in RELEASE.split("."))
__git_hash__ = git_hash = COMMIT
__git_branch__ = git_branch = BRANCH

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
MUON_OPTIMIZER = "muon"

_find, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.activation_checkpointing.checkpointing": "checkpointing=",
        "deepspeed.comm": "init_distributed",
        "deepspeed.config": "DeepSpeedConfig load_ds_config",
        "deepspeed.data": "DeepSpeedDataLoader",
        "deepspeed.dropping": "progressive_layer_drop",
        "deepspeed.engine": "DeepSpeedEngine DeepSpeedOptimizer add_config_arguments initialize",
        "deepspeed.engine.hybrid": "DeepSpeedHybridEngine",
        "deepspeed.engine.parts": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        "deepspeed.engine.pipeline": "DualPipeVEngine PipelineEngine",
        "deepspeed.errors": "DeepSpeedConfigError",
        "deepspeed.inference": "default_inference_config init_inference",
        "deepspeed.inference.config": "DeepSpeedInferenceConfig",
        "deepspeed.inference.engine": "InferenceEngine",
        "deepspeed.module_inject": "replace_transformer_layer",
        "deepspeed.ops.muon": "set_optimizer_flags",
        "deepspeed.parallel.tensor.request": "set_autotp_mode tp_model_init",
        "deepspeed.pipe": "DualPipeVModule PipelineModule",
        "deepspeed.precision.on_device": "OnDevice",
    },
    submodules=(
        "accelerator activation_checkpointing autotuning checkpoint cli comm compression config constants data "
        "dropping elasticity engine env_report errors git_version_info inference launcher linear monitor ops plan "
        f"precision profiling schedulers zero {' '.join(children_of(''))}"
    ),
)
__all__ += ["HAS_TRITON", "__version__", "dist", "log_dist", "logger", "version"]

install()


def __getattr__(name: str) -> Any:
    if name == "dist":
        return _initialized_comm()
    if name == "HAS_TRITON":
        from importlib.util import find_spec

        return find_spec("triton") is not None
    return _find(name)


def _initialized_comm() -> ModuleType | None:
    """Returns ``deepspeed.comm`` if the process group is initialized, otherwise None."""
    from deepspeed import comm

    return comm if comm.is_initialized() else None
