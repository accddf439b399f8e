"""Upstream's import path for names of ``parallel.sequence.fpdt``."""

from deepspeed.parallel.sequence.fpdt import FPDT_FFN as FPDT_FFN
from deepspeed.parallel.sequence.fpdt import FPDT_Attention as FPDT_Attention
from deepspeed.parallel.sequence.fpdt import FPDT_InputConstruct as FPDT_InputConstruct
from deepspeed.parallel.sequence.fpdt import FPDT_LogitsLoss as FPDT_LogitsLoss
