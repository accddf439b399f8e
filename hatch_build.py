"""Writes the commit into wheels and source distributions: neither has the checkout that ``deepspeed.release`` reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds ``deepspeed/commit.txt``, with the commit, to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build; ``version`` is "editable" for a checkout that is installed in place."""
        scope: dict[str, Any] = {"__file__": str(Path(self.root, "deepspeed", "release.py"))}
        exec(Path(scope["__file__"]).read_text(encoding="utf-8"), scope)  # the package itself needs torch
        if version == "editable" or scope["COMMIT"] == scope["UNKNOWN"]:
            return
        self._folder = tempfile.TemporaryDirectory()
        written = Path(self._folder.name, scope["COMMIT_FILE"])
        written.write_text(f"{scope['COMMIT']}\n", encoding="utf-8")
        build_data["force_include"][str(written)] = f"deepspeed/{written.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after a build."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
