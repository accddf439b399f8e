"""The file in which a cluster looks for the reason of a failed run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "DS_FAILURE_FILE"
_SAGEMAKER = Path("/opt/ml/output")


def find_failure_file(environ: Mapping[str, str]) -> Path | None:
    """Returns where to write why a run has failed; None where nobody looks.

    ``DS_FAILURE_FILE`` names it (in a pod: ``/dev/termination-log``). On SageMaker it is ``/opt/ml/output/failure``.
    """
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    if environ.get("SM_HOSTS") and _SAGEMAKER.is_dir():
        return _SAGEMAKER / "failure"
    return None


def write_failure(path: Path, lines: Sequence[str]) -> str | None:
    """Writes the reason of a failure, replacing what an earlier run has written there.

    Returns:
        Why the file cannot be written, as a sentence; None if it was.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{VARIABLE}: cannot write the reason of the failure to {path}: {error}; name a file in a folder"
    return None
