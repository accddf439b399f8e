"""Which folder each rank writes its files into: that of rank 0, or one of its own where it does not see that."""

from __future__ import annotations

import socket

from deepspeed.checkpoint.commit import SaveFolder
from deepspeed.checkpoint.exchange import Exchange
from deepspeed.errors import CheckpointError


def make_folders(exchange: Exchange, folder: SaveFolder, doing: str) -> list[int]:
    """Makes the folders of a save, and returns for each rank the rank that leads its folder. Every rank must call it.

    The ranks of one folder are those that see the same files. A node with a disk of its own has one, and so has each
    rank that a program gives a folder of its own (Ray Train does). The leader makes the folder and commits it.

    Args:
        exchange: The ranks that save together.
        folder: This rank's, by its own path.
        doing: What is being done, for messages.
    """
    what = f"{doing}: making the folder"

    exchange.together(what, lambda: folder.create() if exchange.rank == 0 else None)
    # None: sees the folder of rank 0. Otherwise ranks with equal keys surely share theirs.
    keys = exchange.together(what, lambda: None if folder.is_visible() else (socket.gethostname(), folder.real_path()))
    first: dict[tuple[str, str], int] = {}
    for rank, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, rank)
    if not first:
        return [0] * exchange.size
    makers = sorted(first.values())

    def make() -> None:
        if exchange.rank in makers:
            folder.create()
            folder.mark(exchange.rank)

    exchange.together(what, make)

    def leader() -> int:
        if keys[exchange.rank] is None:
            return 0
        # Nodes may share a disk that rank 0 does not see: then several have made the same folder.
        found = next((maker for maker in makers if folder.is_marked(maker)), None)
        if found is None:
            raise CheckpointError(
                f"{folder.folder}: expected the folder that a rank of this machine has just made; found none. Give "
                "save_checkpoint a folder that all ranks of a machine see, or each rank one of its own"
            )
        return found

    return exchange.together(what, leader)
