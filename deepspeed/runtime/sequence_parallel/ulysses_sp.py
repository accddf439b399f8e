"""Upstream's import path for names of 3 modules."""

from deepspeed.parallel.sequence.batches import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter
from deepspeed.parallel.sequence.tiled import SequenceTiledCompute as SequenceTiledCompute
from deepspeed.parallel.sequence.tiled import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from deepspeed.parallel.sequence.tiled import TiledMLP as TiledMLP
from deepspeed.parallel.sequence.tiled import sequence_tiled_compute as sequence_tiled_compute
from deepspeed.parallel.sequence.ulysses import UlyssesSPAttentionHF as UlyssesSPAttentionHF
