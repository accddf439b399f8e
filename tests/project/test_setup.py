"""The set-up that `make` does: one line per step, and everything that a failing step printed."""

import os
import re
import subprocess

import pytest
import yaml

from deepspeed.release import RELEASE
from tests.project.graph import ROOT

QUIETLY = str(ROOT / ".ci" / "quietly")


def _step(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [QUIETLY, "making a thing", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ})


def test_a_step_is_one_line_with_its_time():
    done = _step("echo much; echo more >&2", VERBOSE="")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"making a thing \.\.\. \d+ s\n", done.stdout)


def test_a_step_that_fails_shows_everything_and_its_exit_status():
    done = _step("echo much; echo 'ERROR: no such version' >&2; exit 3", VERBOSE="")
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        "making a thing ... failed with exit status 3:",
        "much",
        "ERROR: no such version",
    ]


def test_all_of_it_on_request():
    done = _step("echo much", VERBOSE="1")
    assert (done.returncode, done.stdout) == (0, "making a thing\nmuch\n")


def test_a_step_beside_another_program_is_written_with_its_result():
    beside = '"$0" --later "making a thing" sh -c "$1" & sleep 0.05; echo from the other; wait $!'
    for script, status in (("sleep 0.2; echo much", 0), ("sleep 0.2; echo much; exit 3", 3)):
        command = ["sh", "-c", beside, QUIETLY, script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "VERBOSE": ""})
        assert done.returncode == status
        shown = [line for line in done.stdout.splitlines() if line]
        assert shown[0] == "from the other" and shown[1].startswith("making a thing ... ")
        assert shown[2:] == ["much"] * (status != 0)


def test_whatever_make_sets_up_is_such_a_step():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    loud = [
        line.strip()
        for line in makefile.splitlines()
        if re.match(r"\t.*(\binstall -c\b|-m venv \$\(VENV\)|/ruff|/mypy)", line) and not line.startswith("\t$(STEP) ")
    ]
    assert not loud


def test_hooks_of_pre_commit_need_nothing_that_make_does_not_set_up():
    """Each calls a target, all of which create the environment they use."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in hooks:
        target = re.fullmatch(r"make --no-print-directory ([a-z-]+)", hook["entry"])
        assert target and re.search(rf"^{target[1]}: \$\(VENV\)/\.for-tests$", makefile, flags=re.MULTILINE), hook
    assert not re.findall(r'(?:quietly|\$\(STEP\)) "[^"]+" \$\(TEST_ENV\)', makefile), "variables go before the step"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_there_is_a_workflow_for_each_part_of_the_work():
    assert [path.stem for path in WORKFLOWS] == ["docs", "lint", "matrix", "release", "test", "wheel"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    targets = {match[1] for command in commands if (match := re.match(r"make ([\w-]+)", command))}
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    others = [
        command
        for command in commands
        if not command.startswith(("make ", "gh ", "git push ")) and command != ".ci/run"
    ]
    assert commands and others == [], "what a workflow does beside make cannot be tried without it"


def test_a_tag_must_be_the_version_in_hand():
    command = ["make", "-s", "check-release-tag", "TAG=v0.0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and "tag v0.0.1: expected RELEASE" in done.stdout, done.stdout + done.stderr


def test_the_pages_of_a_project_are_there():
    for name in ("LICENSE", "NOTICE", "SECURITY.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"):
        assert (ROOT / name).stat().st_size > 500, name
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (RELEASE, "Apache-2.0")
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text(encoding="utf-8")), form
