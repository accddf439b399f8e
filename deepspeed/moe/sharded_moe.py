"""Gates and the dispatch; re-exports; the code is in :mod:`deepspeed.parallel.expert`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "MOELayer": "deepspeed.parallel.expert.layer",
        "TopKGate": "deepspeed.parallel.expert.gate",
        "multiplicative_jitter": "deepspeed.parallel.expert.gate:jittered",
        "top1gating": "deepspeed.parallel.expert.gate",
        "top2gating": "deepspeed.parallel.expert.gate",
        "topkgating": "deepspeed.parallel.expert.gate",
    },
)
