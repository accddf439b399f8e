"""The documentation site: it builds without a warning, holds every page, and its picture is that of the code."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.project.graph import ROOT

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("material") is None:
        pytest.skip("needs the extra docs: pip install -e .[docs]")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(target)],
        cwd=ROOT,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "https_proxy": "http://127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {path.relative_to(ROOT).parent.with_suffix(".html") for path in (ROOT / "examples").glob("*/README.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages <= built, sorted(map(str, pages - built))
    assert not list(site.rglob("*.py"))


def test_it_asks_nobody_for_scripts_and_fonts(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]+"', text)


def test_the_comments_of_the_tests_are_invisible(site):
    text = (site / "zero" / "stage-2.html").read_text(encoding="utf-8")
    assert "run ranks=2" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert '<div class="highlight"' in text


def test_the_picture_is_that_of_the_placement_table():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["draw"]()
    kept = (ROOT / "docs" / "zero" / "who-keeps-what.svg").read_text(encoding="utf-8")
    assert kept == drawn, "run: python docs/pictures.py"
