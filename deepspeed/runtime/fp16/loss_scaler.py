"""Upstream's import path for names of ``precision.loss_scaler``."""

from deepspeed.precision.loss_scaler import CONSECUTIVE_HYSTERESIS as CONSECUTIVE_HYSTERESIS
from deepspeed.precision.loss_scaler import DELAYED_SHIFT as DELAYED_SHIFT
from deepspeed.precision.loss_scaler import INITIAL_LOSS_SCALE as INITIAL_LOSS_SCALE
from deepspeed.precision.loss_scaler import MIN_LOSS_SCALE as MIN_LOSS_SCALE
from deepspeed.precision.loss_scaler import SCALE_WINDOW as SCALE_WINDOW
from deepspeed.precision.loss_scaler import CreateLossScaler as CreateLossScaler
from deepspeed.precision.loss_scaler import DynamicLossScaler as DynamicLossScaler
from deepspeed.precision.loss_scaler import LossScaler as LossScaler
from deepspeed.precision.loss_scaler import LossScalerBase as LossScalerBase
