"""Reading one section of a configuration, for parts of the package that programs switch on by themselves."""

from __future__ import annotations

from typing import Any

from deepspeed.config.messages import ConfigMessages
from deepspeed.config.parsing import ParsedConfig
from deepspeed.config.reader import build, clean
from deepspeed.config.section import Section
from deepspeed.config.sections.root import Root
from deepspeed.config.source import read_source


def parse_section(source: Any, name: str) -> Section | None:
    """Reads and checks the section ``name``; the rest may be unfinished and is not looked at.

    Args:
        source: A :class:`ParsedConfig`, a dict, a path to an Hjson file, or URL-safe base64 of JSON.
        name: A key of the top level that holds a section.

    Returns:
        The section; None if the configuration does not have it.

    Raises:
        DeepSpeedConfigError: With every problem of the section.
    """
    if isinstance(source, ParsedConfig):
        section: Section | None = getattr(source.root, name)
        return section
    document = read_source(source)
    if name not in document.data:
        return None
    findings = ConfigMessages(document.lines, {}, document.name)
    root = build(Root, clean(Root, {name: document.data[name]}, (), findings), (), findings)
    findings.raise_if_any()
    return getattr(root, name)
