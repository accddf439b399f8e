"""Reads the fenced blocks of a page, and the comment above each about running it.

    <!-- run -->  <!-- run ranks=2 -->     Python: run as that many ranks of the test harness
    <!-- file NAME -->                     written to NAME in the page's folder; with ranks=2 also run
    <!-- shell -->                         run by bash in the page's folder
    <!-- output -->                        what rank 0 of the block before printed; `...` stands for anything
    <!-- not run: REASON -->

`slow` as a further word puts the block among the slow tests. JSON blocks need no comment: each is checked as a
configuration. The comments are invisible in the rendered page.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.project.graph import ROOT

# Pages with commands that other tests run.
ELSEWHERE = {"guide/launching.md": "tests/launcher"}

_FENCE = re.compile(
    r"(?:^<!-- (?P<directive>[^\n]*?) -->\n)?^```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Block:
    """One fenced block.

    Attributes:
        page: Path below the repository's root.
        line: Line of its fence.
        language: First word of the fence.
        directive: The comment above it; empty if there is none.
        body: Its text.
        output: The block of expected output that follows it.
        span: Where that output's text lies in the page.
    """

    page: str
    line: int
    language: str
    directive: str
    body: str
    output: str | None = None
    span: tuple[int, int] = (0, 0)
    words: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.directive.split()

    @property
    def kind(self) -> str:
        """First word of the directive."""
        return self.words[0] if self.words else ""

    @property
    def is_slow(self) -> bool:
        return "slow" in self.words[1:]

    @property
    def ranks(self) -> int:
        given = [word.partition("=")[2] for word in self.words if word.startswith("ranks=")]
        return int(given[0]) if given else (1 if self.kind == "run" else 0)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README, AGENTS and every page below docs."""
    return sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")])


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page in order; expected outputs are attached to the block they belong to."""
    text = path.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        directive = match.group("directive") or ""
        block = Block(str(path.relative_to(ROOT)), line, match.group("language"), directive, match.group("body"))
        if block.kind == "output":
            found[-1].output, found[-1].span = block.body, match.span("body")
        else:
            found.append(block)
    return found


def all_blocks() -> list[Block]:
    """The blocks of every page whose commands are run here."""
    own = [
        path
        for path in pages()
        if path.relative_to(ROOT / "docs" if path.parent != ROOT else ROOT).as_posix() not in ELSEWHERE
    ]
    return [block for path in own for block in blocks_of(path)]
