"""Upstream's import path for names of ``constants``."""

from deepspeed.constants import ROUTE_EVAL as ROUTE_EVAL
from deepspeed.constants import ROUTE_PREDICT as ROUTE_PREDICT
from deepspeed.constants import ROUTE_TRAIN as ROUTE_TRAIN
