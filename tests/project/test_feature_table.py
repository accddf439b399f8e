"""Features of the engine: their page is in step, and every name by which one is asked for is in the list."""

import ast

from deepspeed.config.section import Section, features_of
from deepspeed.config.sections.root import Root
from deepspeed.engine.features import FEATURES, feature_of
from deepspeed.engine_feature import _BY_METHOD, MARK
from tests.project import feature_table, graph


def test_page_of_the_features_is_in_step() -> None:
    assert feature_table.PAGE.read_text(encoding="utf-8") == feature_table.page(), (
        "run: python -m tests.project.feature_table"
    )


def test_titles_are_different() -> None:
    titles = [feature_of(name).title for name in FEATURES]
    assert len(set(titles)) == len(titles)


def test_every_module_called_feature_is_in_the_list() -> None:
    found = {name for name in graph.modules() if name.endswith(".feature")}
    assert found <= set(FEATURES), f"add to deepspeed.engine.features.FEATURES: {sorted(found - set(FEATURES))}"


def test_requested_features_are_in_the_list() -> None:
    requested = {name for kind in _sections(Section) if (name := kind._feature) is not None}
    requested |= set(_BY_METHOD.values()) | _marks()
    assert {"deepspeed.parallel.expert.feature", "deepspeed.linear.feature"} <= requested
    assert requested <= set(FEATURES), f"no such feature: {sorted(requested - set(FEATURES))}"


def test_sections_that_are_off_request_nothing() -> None:
    on = Root.model_validate({"expert_parallel": {"enabled": True}, "data_efficiency": {"enabled": True}})
    off = Root.model_validate({"expert_parallel": {"enabled": False}, "hybrid_engine": {"enabled": False}})
    assert set(features_of(on)) == {"deepspeed.parallel.expert.feature"}
    assert set(features_of(off)) == set(features_of(Root())) == set()


def _sections(kind: type[Section]) -> set[type[Section]]:
    below = {found for derived in kind.__subclasses__() for found in _sections(derived)}
    return {kind} | below


def _marks() -> set[str]:
    """Returns the names in class attributes called as the mark is, and in calls of ``mark``."""
    found: set[str] = set()
    for module in graph.modules():
        for node in graph.nodes_of(module, ast.Assign, ast.Call):
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == MARK for target in node.targets):
                names: ast.AST = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "mark":
                names = node
            else:
                continue
            found |= {part.value for part in ast.walk(names) if isinstance(part, ast.Constant)}
    return {name for name in found if isinstance(name, str)}
