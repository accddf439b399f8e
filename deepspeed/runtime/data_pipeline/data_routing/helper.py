"""Upstream's import path for names of ``dropping.tokens``."""

from deepspeed.dropping.tokens import convert_to_random_ltd as convert_to_random_ltd
from deepspeed.dropping.tokens import remove_random_ltd_state_dict as remove_random_ltd_state_dict
from deepspeed.dropping.tokens import save_without_random_ltd as save_without_random_ltd
