"""Upstream's import path for names of ``missing_features``."""

from deepspeed.missing_features import FEATURES as FEATURES
from deepspeed.missing_features import Feature as Feature
from deepspeed.missing_features import is_missing as is_missing
from deepspeed.missing_features import missing_names as missing_names
from deepspeed.missing_features import unavailable as unavailable
