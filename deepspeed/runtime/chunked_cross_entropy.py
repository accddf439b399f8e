"""Upstream's import path for names of ``ops.fused_loss``."""

from deepspeed.ops.fused_loss import ChunkedCausalLMLoss as ChunkedCausalLMLoss
from deepspeed.ops.fused_loss import install_chunked_causal_lm_loss as install_chunked_causal_lm_loss
