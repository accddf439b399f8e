"""Upstream's import path for names of ``logging``."""

from deepspeed.logging import log_dist as log_dist
from deepspeed.logging import log_dist_once as log_dist_once
from deepspeed.logging import logger as logger
from deepspeed.logging import print_dist as print_dist
from deepspeed.logging import set_log_level_from_string as set_log_level_from_string
from deepspeed.logging import should_log_le as should_log_le
