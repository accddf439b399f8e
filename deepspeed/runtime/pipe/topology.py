"""Upstream's import path for names of ``parallel.pipe.topology``."""

from deepspeed.parallel.pipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from deepspeed.parallel.pipe.topology import PipelineParallelGrid as PipelineParallelGrid
from deepspeed.parallel.pipe.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from deepspeed.parallel.pipe.topology import ProcessTopology as ProcessTopology
