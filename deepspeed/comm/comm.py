"""``deepspeed.comm`` by upstream's longer path; everything is looked up there."""

from __future__ import annotations

from typing import Any

from deepspeed import comm


def __getattr__(name: str) -> Any:
    return getattr(comm, name)


def __dir__() -> list[str]:
    return dir(comm)
