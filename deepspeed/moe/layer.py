"""The mixture-of-experts layer; re-exports; the code is in :mod:`deepspeed.parallel.expert.layer`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Experts": "deepspeed.parallel.expert.experts",
        "MOELayer": "deepspeed.parallel.expert.layer",
        "MoE": "deepspeed.parallel.expert.layer",
        "TopKGate": "deepspeed.parallel.expert.gate",
    },
)
