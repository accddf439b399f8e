"""What the package logs meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Texts(list[str]):
    """Texts of log records, in their order."""

    def about(self, words: str) -> list[str]:
        """Returns those that contain ``words``."""
        return [text for text in self if words in text]


@contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[Texts]:
    """Collects the texts that the package logs on this rank from ``level`` on, while the block runs."""
    texts = Texts()
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
