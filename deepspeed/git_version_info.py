"""The version by upstream's path; re-exports only."""

from __future__ import annotations

from deepspeed import git_branch, git_hash, version

__all__ = ["git_branch", "git_hash", "version"]
