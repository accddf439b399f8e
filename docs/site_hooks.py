"""Hooks of the documentation site (mkdocs).

Pages from ``examples/``, a navigation of the pages that exist, tables and contents that show names whole, and pictures
that take the colors of the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_PICTURE = re.compile(r'<p><img alt="([^"]*)" src="([^":]+\.svg)" ?/?></p>')


def _examples() -> dict[str, Path]:
    """Page of the site -> README of the example."""
    return {f"examples/{path.parent.name}.md": path for path in sorted((ROOT / "examples").glob("*/README.md"))}


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip() or path.parent.name


def _kept(entry: Any, existing: set[str]) -> Any:
    """A part of the navigation without the pages that do not exist; None if nothing is left of it."""
    if isinstance(entry, str):
        return entry if entry in existing else None
    if isinstance(entry, list):
        return [kept for each in entry if (kept := _kept(each, existing)) is not None]
    ((name, value),) = entry.items()
    if value == "EXAMPLES":
        value = [{_title(path): page} for page, path in _examples().items()]
    kept = _kept(value, existing)
    return {name: kept} if kept else None


def on_config(config: Any) -> Any:
    """Fills in the examples and drops what does not exist."""
    docs = Path(config["docs_dir"])
    existing = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | set(_examples())
    config["nav"] = _kept(config["nav"], existing)
    config["site_name"] = f"{config['site_name']} {_version()}"
    return config


def _version() -> str:
    """Returns the version of the package that the site describes."""
    text = (ROOT / "deepspeed" / "release.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^RELEASE = "([^"]+)"', text, flags=re.MULTILINE)
    return version


def on_files(files: Files, config: Any) -> Files:
    """Adds the READMEs of the examples as pages."""
    for page, path in _examples().items():
        files.append(File.generated(config, page, content=_inside_the_site(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository that are not pages become plain text; the start page takes the whole width."""
    if page.is_homepage:
        page.meta["hide"] = ["toc"]

    def plain(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = target.partition("#")[0]
        if not path or re.match(r"[a-z]+:", target) or path.endswith((".md", ".png", ".svg", ".json")):
            return match.group(0)
        return f"{text} (`{path.lstrip('./')}`)"

    return _LINK.sub(plain, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Names in tables may break after ``_`` and ``.``; pictures become part of the page and take its colors."""
    entries = list(_flat(page.toc.items))
    for entry, title in zip(entries, _shortest([entry.title for entry in entries]), strict=True):
        entry.title = title
    html = _TABLE.sub(lambda table: _CODE.sub(_breakable, table.group(0)), html)
    return _PICTURE.sub(lambda picture: _drawn(picture, Path(page.file.abs_src_path).parent), html)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[a-z\d])([_.])(?=[a-z])", r"\1<wbr>", code.group(0))


def _drawn(picture: re.Match[str], folder: Path) -> str:
    name, source = picture.groups()
    text = (folder / source).read_text(encoding="utf-8")
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def _flat(entries: Iterable[AnchorLink]) -> Iterator[AnchorLink]:
    for entry in entries:
        yield entry
        yield from _flat(entry.children)


def _shortest(titles: list[str]) -> list[str]:
    """Of each dotted name the shortest ending that no other of them has: a table of contents is narrow."""
    dotted = re.compile(r"[\w<>&;\[\]]+(\.[\w<>&;\[\]]+)+")
    endings = Counter(ending for title in set(titles) for ending in _endings(title))

    def shortened(title: str) -> str:
        if not dotted.fullmatch(title):
            return title
        return next((ending for ending in _endings(title) if endings[ending] == 1), title)

    return [shortened(title) for title in titles]


def _endings(name: str) -> list[str]:
    """``c``, ``b.c``, ``a.b.c`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _inside_the_site(readme: Path) -> str:
    """The text of an example's README with its links to pages corrected and links to other files as plain text."""

    def corrected(match: re.Match[str]) -> str:
        text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path, _, anchor = target.partition("#")
        full = (readme.parent / path).resolve()
        try:
            inside = full.relative_to(ROOT / "docs").as_posix()
        except ValueError:
            name = full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else path
            if full.name == "README.md" and full.parent.parent == ROOT / "examples":
                return f"[{text}]({full.parent.name}.md{'#' + anchor if anchor else ''})"
            return f"{text} (`{name}`)"
        return f"[{text}](../{inside}{'#' + anchor if anchor else ''})"

    return _LINK.sub(corrected, readme.read_text(encoding="utf-8"))
