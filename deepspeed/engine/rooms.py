"""The rooms of the package that few models need, and how the engine tells whether this one does.

Loading all of them took 0.25 s at the first ``initialize``. Two rules spare that. What a *section of the configuration*
asks for is imported by the function that serves the section. What a *model* brings along (stages, expert layers, layers
that are cut, compressed or dropped) loaded its room when it was made, since the classes of its parts are defined there;
the engine looks for such parts only where the room is loaded.
"""

from __future__ import annotations

import sys

from torch import nn

COMPRESSION = "deepspeed.compression"
DROPPING = "deepspeed.dropping"
EXPERT = "deepspeed.parallel.expert"
LINEAR = "deepspeed.linear"
PIPE = "deepspeed.parallel.pipe"
SEQUENCE = "deepspeed.parallel.sequence"
TENSOR = "deepspeed.parallel.tensor"

ROOMS = (COMPRESSION, DROPPING, EXPERT, LINEAR, PIPE, SEQUENCE, TENSOR)


def is_loaded(room: str) -> bool:
    """Whether a model may have parts of this one of the :data:`ROOMS`."""
    return room in sys.modules


def is_pipeline(model: nn.Module) -> bool:
    """Whether it is a ``PipelineModule``."""
    if not is_loaded(PIPE):
        return False
    from deepspeed.parallel.pipe.module import PipelineModule

    return isinstance(model, PipelineModule)
