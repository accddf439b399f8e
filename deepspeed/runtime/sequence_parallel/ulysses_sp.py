"""Sequence parallelism for Transformers models; see :mod:`deepspeed.parallel.sequence`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_ROOM = "deepspeed.parallel.sequence"
_TILED = f"{_ROOM}.tiled"
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "SequenceTiledCompute": _TILED,
        "TiledFusedLogitsLoss": _TILED,
        "TiledMLP": _TILED,
        "UlyssesSPAttentionHF": f"{_ROOM}.ulysses",
        "UlyssesSPDataLoaderAdapter": f"{_ROOM}.loader",
        "sequence_tiled_compute": _TILED,
    },
)
