"""The documentation site: it builds without a warning, holds every page, and its picture is that of the code."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys

import pytest

from deepspeed.release import RELEASE
from deepspeed.zero.placement import Placement
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


def test_the_head_of_the_site_names_the_version(site):
    head = (site / "index.html").read_text(encoding="utf-8")
    assert f"<title>deepspeed {RELEASE}</title>" in head


def test_the_site_loads_no_scripts_and_fonts_from_elsewhere(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]+"', text)


def test_the_comments_of_the_tests_are_invisible(site):
    text = (site / "zero" / "stage-2.html").read_text(encoding="utf-8")
    assert "run ranks=2" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert '<div class="highlight"' in text


def test_the_search_works_on_pages_opened_as_files(site):
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    text = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert '<script src="../assets/iframe-worker.js">' in text and (site / "assets" / "iframe-worker.js").is_file()


def test_names_in_tables_break_at_underscores_and_dots_only(site):
    text = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert "<code>gradient_<wbr>accumulation_<wbr>steps</code>" in text
    assert "<code>16777216.0</code>" in text
    assert "<wbr>" not in re.sub(r"<table>.*?</table>", "", text, flags=re.DOTALL)


def test_entries_of_a_table_of_contents_are_distinct(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        contents = re.search(r'md-sidebar--secondary".*?<div class="md-content"', text, re.DOTALL)
        entries = re.findall(r'<span class="md-ellipsis">\s*(.*?)\s*</span>', contents.group(0) if contents else "")
        assert len(entries) == len(set(entries)), path.relative_to(site)


def test_a_list_continues_counting_after_a_code_box(site):
    text = (site / "migrating" / "from-upstream.html").read_text(encoding="utf-8")
    assert re.search(r'<ol start="3">\s*<li>Start it as before', text)


def test_pictures_take_the_colors_of_the_page(site):
    for page in ("index.html", "zero/index.html"):
        assert '<svg role="img" aria-label="What rank 0 of 4 keeps' in (site / page).read_text(encoding="utf-8")


def test_pictures_are_those_of_the_code():
    for name, draw in runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"].items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == draw(), f"{name}: run python docs/pictures.py"


def test_the_picture_agrees_with_the_table_beside_it():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    text = (ROOT / "docs" / "zero" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[stage (\d)\][^|]*\| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for stage, *cells in rows:
        slices = {state: is_slice for state, (is_slice, _) in pictures["kept"](Placement.of_stage(int(stage))).items()}
        drawn = [slices["parameters"], slices["gradients"], slices["masters"]]
        assert ["**1/N**" if is_slice else "whole" for is_slice in drawn] == cells
        assert slices["optimizer state"] == slices["masters"]
