"""The import paths that the ecosystem uses, as one table; re-exports only.

:mod:`.paths` says which modules there are and where their names are defined; :mod:`.finder` makes them at import.
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names
from deepspeed.runtime.finder import children_of, install

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedOptimizer": "deepspeed.zero.update.base_optimizer",
        "ZeROOptimizer": "deepspeed.zero.update.base_optimizer",
    },
    submodules=children_of(""),
)
install()
