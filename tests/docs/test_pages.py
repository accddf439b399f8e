"""Everything in the documents that can run is run; configurations are checked; quoted messages exist."""

import re
from pathlib import Path
from typing import Any

import hjson
import pytest

from deepspeed.config import parse
from tests.docs.messages import corpus, occurs
from tests.docs.pages import ELSEWHERE, all_blocks, blocks_of, pages
from tests.docs.running import difference, run_block
from tests.ecosystem.support import needs_transformers
from tests.project.graph import ROOT

pytestmark = pytest.mark.docs

RUNS = {"python": {"run", "file"}, "sh": {"shell", "file"}, "json": {"file"}}
RUNNING = {block.page for block in all_blocks() if block.ranks or block.kind == "shell"}


def _cases(names: set[str]) -> list[Any]:
    """Pages as parameters of a test, skipped where the library that their code imports is not installed."""
    imports = re.compile(r"^\s*(?:from|import) transformers\b", re.MULTILINE)
    uses_models = {block.page for block in all_blocks() if imports.search(block.body)}
    return [pytest.param(name, marks=needs_transformers if name in uses_models else ()) for name in sorted(names)]


def test_every_block_has_a_comment_on_how_it_is_run():
    wrong = []
    for block in all_blocks():
        is_code = block.language in (*RUNS, "bash", "console", "py", "shell", "yaml")
        if not block.directive:
            if is_code and block.language != "json":
                wrong.append(f"{block}: a {block.language} block without a comment about how it is run")
        elif block.directive.startswith("not run: "):
            if len(block.directive) < len("not run: ") + 10:
                wrong.append(f"{block}: say why it is not run")
        elif block.kind not in RUNS.get(block.language, {"file"}):
            wrong.append(f"{block}: {block.directive!r} does not fit a {block.language} block")
    assert not wrong, "\n".join(wrong) + "\n(tests/docs/pages.py has the comments to choose from)"


def test_guides_say_who_needs_them_and_show_what_runs():
    """Other tests run the programs of launching and places; choosing a parallelism has a command only."""
    for path in sorted((ROOT / "docs" / "guide").glob("*.md")):
        first = path.read_text(encoding="utf-8").split("\n\n")[1]
        assert first.startswith("For ") and len(first.split()) >= 7, f"{path.name} begins with {first!r}"
        runs = {block.kind for block in blocks_of(path)} & {"run", "file", "shell"}
        assert runs or path.name in ("choosing-parallelism.md", "launching.md", "places.md"), (
            f"{path.name} shows no program"
        )


def test_pages_run_elsewhere_have_their_tests():
    for tests in ELSEWHERE.values():
        assert (ROOT / tests).is_dir()


def test_configurations_are_valid():
    checked = 0
    for block in all_blocks():
        if block.language != "json":
            continue
        document = hjson.loads(block.body)
        if not any("batch" in key for key in document):  # a part of a configuration
            document["train_micro_batch_size_per_gpu"] = 1
        parsed = parse(document, dp_world_size=2)
        idle = [notice for notice in parsed.notices if "no effect" in notice]
        assert not idle, f"{block}: {idle}"
        checked += 1
    assert checked >= 8


def _run_page(page: str, folder: Path, slow: bool) -> None:
    wrong = []
    blocks = blocks_of(ROOT / page)
    for block in blocks:
        # The slow test runs everything, because later blocks may need what earlier ones left.
        printed = run_block(block, folder, with_slow=slow)
        if printed is not None and block.output is not None and (problem := difference(block, printed)):
            wrong.append(problem)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", _cases(RUNNING))
def test_the_blocks_of_the_page_run(page, tmp_path):
    _run_page(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", _cases({block.page for block in all_blocks() if block.is_slow}))
def test_its_commands_too(page, tmp_path):
    _run_page(page, tmp_path, slow=True)


# -- troubleshooting ---------------------------------------------------------------------------------------------------


def _quoted(path: Path) -> list[str]:
    """Messages are the blocks marked `message`."""
    return re.findall(r"^```message\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_quoted_messages_exist_in_the_code():
    quoted = [(path, message) for path in pages() for message in _quoted(path)]
    assert len([path for path, _ in quoted if path.name == "troubleshooting.md"]) >= 30
    texts = corpus()
    missing = [f"{path.relative_to(ROOT)}: {message}" for path, message in quoted if not occurs(message, texts)]
    assert not missing, "not found in code:\n" + "\n".join(missing)


def test_a_message_that_no_code_prints_is_found():
    assert not occurs("engine.backward: this sentence is … of nobody", corpus())
    assert not occurs("…", corpus()) and occurs(
        "a block of no_sync or coalesce_grad_reduction is already open", corpus()
    )
