"""Whether files of parameters are used through the system's page cache.

Direct access moves bytes between the disk and our buffers alone, which is right for a model larger than memory: the
cache would hold nothing of it when it comes round again, and would push out what others need. Parameters that no
optimizer updates and that fit into free memory are better off in the cache: after the first use they come at the speed
of memory, and the system takes the pages back by itself when memory is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.accelerator import host_memory

_RESERVE = 8  # one part in so many of the host's memory stays free for others


@dataclass(frozen=True)
class CachePolicy:
    """Decides about the page cache.

    Attributes:
        asked: ``offload_param.page_cache``; None: what fits is cached.
        is_trained: Something updates the values, so that cached pages would be written out at every step.
        ranks: Ranks on this host, which have as much each.
    """

    asked: bool | None = False
    is_trained: bool = True
    ranks: int = 1

    def choose(self, nbytes: int) -> tuple[bool, str]:
        """Returns whether ``nbytes`` of this rank go through the cache, and the reason, for the log."""
        if self.asked is not None:
            return self.asked, f"offload_param.page_cache is {str(self.asked).lower()}" if self.asked else ""
        if self.is_trained:
            return False, ""
        needed, free = nbytes * self.ranks, host_memory.available_bytes()
        fits = needed + host_memory.total_bytes() // _RESERVE <= free
        return fits, f"{needed:,} bytes on this host, {free:,} of its memory are free"
