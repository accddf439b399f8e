"""Upstream's import path for names of ``parallel.expert.activations``."""

from deepspeed.parallel.expert.activations import EXPERT_ACTIVATIONS as EXPERT_ACTIVATIONS
from deepspeed.parallel.expert.activations import ExpertActivation as ExpertActivation
from deepspeed.parallel.expert.activations import get_expert_activation as get_expert_activation
from deepspeed.parallel.expert.activations import register_expert_activation as register_expert_activation
