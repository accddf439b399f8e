"""What ranks post for each other's watchdogs, checked: whoever reaches the rendezvous store may write to it."""

from __future__ import annotations

import json
from typing import Any

from deepspeed.printable import printable

_TYPES: dict[str, tuple[type, ...]] = {
    "look": (int,),
    "channel": (str,),
    "index": (int,),
    "members": (list,),
    "label": (str,),
    "on_stream": (bool,),
    "blocks_host": (bool,),
    "gives_up": (bool,),
    "issued": (dict,),
    "key": (int, type(None)),
    "has_left": (bool,),
}
# What a rank posts that waits, and one whose program has ended.
_WAITING = {"look", "channel", "index", "members", "label", "issued"}
_LEFT = {"has_left", "issued"}


def read_post(text: str, size: int) -> dict[str, Any] | None:
    """Returns a rank's post with every value of the right type; None if the text is no post.

    Args:
        text: What the store holds.
        size: Ranks of the job.
    """
    try:
        post = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(post, dict) or not (post.keys() >= _WAITING or post.keys() >= _LEFT):
        return None
    if any(type(value) not in _TYPES.get(name, (type(value),)) for name, value in post.items()):
        return None
    if not all(type(count) is int for count in post["issued"].values()):
        return None
    if not all(type(rank) is int and 0 <= rank < size for rank in post.get("members", ())):
        return None
    return {**post, "label": printable(post["label"])} if "label" in post else post
