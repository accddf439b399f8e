"""``python -m tests.docs.refresh PAGE...``: writes what the blocks print into their output blocks.

Outputs with ``...`` in them are left alone.
"""

import sys
import tempfile
from pathlib import Path

from tests.docs.pages import blocks_of
from tests.docs.running import run_block


def refresh(path: Path) -> int:
    """Rewrites one page; returns how many outputs changed."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks_of(path):
            wanted = block.output is not None and "..." not in block.output
            printed = run_block(block, Path(folder), with_slow=wanted)
            if wanted and printed is not None:
                results.append((block, printed))
    text, changed = path.read_text(encoding="utf-8"), 0
    for block, printed in reversed(results):
        start, stop = block.span
        if text[start:stop] != printed:
            text, changed = text[:start] + printed + text[stop:], changed + 1
    path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, refresh(Path(name).resolve()))
