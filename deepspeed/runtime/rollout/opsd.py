"""Upstream's import path for names of ``rollout.distillation``."""

from deepspeed.rollout.distillation import ResponseTokenBatch as ResponseTokenBatch
from deepspeed.rollout.distillation import generalized_jsd_loss as generalized_jsd_loss
