"""Upstream's import path for names of ``config``, ``errors`` and ``ops.build``."""

from deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
from deepspeed.config import load_ds_config as load_ds_config
from deepspeed.errors import DeepSpeedConfigError as DeepSpeedConfigError
from deepspeed.ops.build import ADAGRAD_OPTIMIZER as ADAGRAD_OPTIMIZER
from deepspeed.ops.build import ADAM_OPTIMIZER as ADAM_OPTIMIZER
from deepspeed.ops.build import ADAM_W_MODE as ADAM_W_MODE
from deepspeed.ops.build import ADAMW_OPTIMIZER as ADAMW_OPTIMIZER
from deepspeed.ops.build import DEEPSPEED_OPTIMIZERS as DEEPSPEED_OPTIMIZERS
from deepspeed.ops.build import LAMB_OPTIMIZER as LAMB_OPTIMIZER
from deepspeed.ops.build import LION_OPTIMIZER as LION_OPTIMIZER
from deepspeed.ops.build import MUADAM_OPTIMIZER as MUADAM_OPTIMIZER
from deepspeed.ops.build import MUADAMW_OPTIMIZER as MUADAMW_OPTIMIZER
from deepspeed.ops.build import MUON_OPTIMIZER as MUON_OPTIMIZER
from deepspeed.ops.build import MUSGD_OPTIMIZER as MUSGD_OPTIMIZER
from deepspeed.ops.build import ONEBIT_ADAM_OPTIMIZER as ONEBIT_ADAM_OPTIMIZER
from deepspeed.ops.build import ONEBIT_LAMB_OPTIMIZER as ONEBIT_LAMB_OPTIMIZER
from deepspeed.ops.build import TORCH_ADAM_PARAM as TORCH_ADAM_PARAM
from deepspeed.ops.build import ZERO_ONE_ADAM_OPTIMIZER as ZERO_ONE_ADAM_OPTIMIZER
