"""Upstream's import path for names of ``errors``."""

from deepspeed.errors import CallOrderError as CallOrderError
from deepspeed.errors import CheckpointError as CheckpointError
from deepspeed.errors import CommunicationError as CommunicationError
from deepspeed.errors import DeepSpeedConfigError as DeepSpeedConfigError
from deepspeed.errors import DeepSpeedError as DeepSpeedError
from deepspeed.errors import DeprecatedException as DeprecatedException
from deepspeed.errors import DivergenceError as DivergenceError
from deepspeed.errors import NonFiniteError as NonFiniteError
from deepspeed.errors import NotYetSupportedError as NotYetSupportedError
from deepspeed.errors import ShardedAccessError as ShardedAccessError
