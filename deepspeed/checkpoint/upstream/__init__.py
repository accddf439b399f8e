"""Reading checkpoints that the original DeepSpeed wrote: stages 0 to 3, and its universal layout.

``files`` finds and opens the files without running code, ``walks`` is the arithmetic of the flat partitions,
``partitioned`` and ``universal`` read a folder into a ``content``, and ``source`` shows that as a
:class:`~deepspeed.checkpoint.source.CheckpointSource`.
"""

from __future__ import annotations

from deepspeed.checkpoint.upstream.source import UpstreamSource, open_upstream

__all__ = ["UpstreamSource", "open_upstream"]
