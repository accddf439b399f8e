"""Which releases of the Transformers library have their loading replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.models import loading


def _with_record(model, target_name, param_value, loading_info, hf_quantizer):
    """As in 5.17."""


def _with_sets(model, target_name, param_value, mismatch_keys, missing_keys, unexpected_keys, operation, quantizer):
    """As in 5.0, which gathers parameters itself."""


@pytest.mark.parametrize(("setter", "is_wrapped"), [(_with_record, True), (_with_sets, False), (None, False)])
def test_only_a_loader_that_passes_a_record_is_replaced(monkeypatch, setter, is_wrapped):
    def original(*_args):
        """Loads."""

    kind = type("PreTrainedModel", (), {"_load_pretrained_model": staticmethod(original)})
    loader = SimpleNamespace() if setter is None else SimpleNamespace(set_param_for_module=setter)
    monkeypatch.setitem(loading.sys.modules, loading._MODELS, SimpleNamespace(PreTrainedModel=kind))
    monkeypatch.setitem(loading.sys.modules, loading._LOADER, loader)
    loading.wrap_loading(lambda model, settings, call: None)
    assert (kind._load_pretrained_model is not original) == is_wrapped
