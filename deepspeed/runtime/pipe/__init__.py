"""Upstream's import path for names of ``parallel.pipe.topology`` and ``pipe``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.parallel.pipe.topology import ProcessTopology as ProcessTopology
    from deepspeed.pipe import LayerSpec as LayerSpec
    from deepspeed.pipe import PipelineModule as PipelineModule
    from deepspeed.pipe import TiedLayerSpec as TiedLayerSpec
    from deepspeed.runtime.pipe import engine as engine
    from deepspeed.runtime.pipe import module as module
    from deepspeed.runtime.pipe import p2p as p2p
    from deepspeed.runtime.pipe import schedule as schedule
    from deepspeed.runtime.pipe import topology as topology

lazy_names(__name__)
