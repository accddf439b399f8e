"""Which features an engine has: asked for by configuration, by axes of the mesh and by marks."""

import ast

import pytest
from torch import nn

from deepspeed.axes import DATA, SEQUENCE
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config.sections.root import Root
from deepspeed.engine.features import FEATURES, FeatureSet, feature_of
from deepspeed.engine_feature import mark
from tests.project import graph


def _titles(features):
    return [feature.title for feature in features._features.values()]


def test_sharing_samples_needs_no_feature():
    features = FeatureSet()
    features.add_for_configuration(Root(), Mesh(((DATA, 4),)))
    assert _titles(features) == []


def test_an_axis_requests_its_feature():
    features = FeatureSet()
    features.add_for_configuration(Root(), Mesh(((DATA, 2), (SEQUENCE, 2))))
    assert _titles(features) == [feature_of("deepspeed.parallel.sequence.feature").title]


def test_features_have_the_order_of_the_list_in_any_order_of_requests():
    features = FeatureSet()
    for name in reversed(FEATURES):
        model = nn.Linear(2, 2)
        mark(model, name)
        features.add_for_objects(model)
    assert list(features._features) == list(FEATURES)


@pytest.mark.parametrize(
    "ask",
    [
        lambda features: features.add_for_configuration(Root(), Mesh((("cluster", 2),))),
        lambda features: features.add_for_objects(_marked("deepspeed.nowhere.feature")),
    ],
    ids=["axis", "mark"],
)
def test_a_feature_that_is_not_in_the_list_is_named(ask):
    with pytest.raises(LookupError, match=r"(cluster|deepspeed\.nowhere\.feature): asked for, but not in"):
        ask(FeatureSet())


def test_only_the_list_of_features_names_one_of_another_subpackage():
    outside = {name for name in FEATURES if not name.startswith("deepspeed.engine.")}
    modules = [name for name in graph.modules() if name.startswith("deepspeed.engine.")]
    named = {module for module in modules for node in graph.nodes_of(module, ast.Constant) if node.value in outside}
    named |= {entry.importer for entry in graph.imports() if entry.importer in modules and entry.imported in outside}
    assert named == {feature_of.__module__}


def _marked(name):
    model = nn.Linear(2, 2)
    mark(model, name)
    return model
