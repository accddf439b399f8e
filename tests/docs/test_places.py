"""The page of places names every variable of schedulers and clusters that the package reads."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTERS = "SLURM|OMPI_COMM|PMI|PMIX|MPI|MV2_COMM|PALS|LSB|PET|SKYPILOT|SM|TRAINING_JOB|TORCHELASTIC"
NO_VARIABLES = {"MPI_BACKEND"}


def test_every_variable_of_a_process_place_is_on_the_page():
    page = (ROOT / "docs" / "guide" / "places.md").read_text(encoding="utf-8")
    read = set()
    for path in (ROOT / "deepspeed").rglob("*.py"):
        read |= set(re.findall(rf"[\"']((?:{SETTERS})_[A-Z0-9_]+)[\"']", path.read_text(encoding="utf-8")))
    missing = {name for name in read - NO_VARIABLES if f"`{name}`" not in page}
    assert len(read) > 40 and not missing, sorted(missing)
    unread = set(re.findall(rf"`((?:{SETTERS})_[A-Z0-9_]+)`", page)) - read
    assert not unread, sorted(unread)
