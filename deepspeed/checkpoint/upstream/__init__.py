"""Reads checkpoints that the original DeepSpeed wrote: stages 0 to 3, and its universal layout, which it writes too.

``files`` finds and opens the files without running code, ``content`` has the arithmetic of the flat partitions,
``partitioned`` reads a folder into it, and ``source`` (the universal layout too) shows that as a
:class:`~deepspeed.checkpoint.source.CheckpointSource`. ``universal`` writes.
"""

from __future__ import annotations

from deepspeed.checkpoint.upstream.source import UpstreamSource, open_upstream

__all__ = ["UpstreamSource", "open_upstream"]
