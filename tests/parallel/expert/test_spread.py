"""Every class of experts in the Transformers library computes the same when its experts are spread."""

import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.models.stacked_experts import lacks
from deepspeed.parallel.expert.spread import Spread, is_stack, spread, stack_rows

transformers = pytest.importorskip("transformers")
errors = pytest.importorskip("huggingface_hub.errors")

_SMALL = {
    "hidden_size": 16, "moe_latent_size": None,
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 12
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k"), 2),
}  # fmt: skip


def _files() -> list[Path]:
    """Of models whose experts say how their weights lie."""
    models = Path(transformers.__file__).parent / "models"
    return [path for path in sorted(models.glob("*/modeling_*.py")) if "use_experts_implementation" in path.read_text()]


def _classes(path: Path) -> list[tuple[Any, list[Any]]]:
    """``(class, configurations that it may want)``."""
    place = f"transformers.models.{path.parent.name}"
    module = importlib.import_module(f"{place}.{path.stem}")
    configuration = importlib.import_module(f"{place}.{path.stem.replace('modeling_', 'configuration_')}")
    configs = [
        one
        for one in vars(configuration).values()
        if inspect.isclass(one) and issubclass(one, transformers.PreTrainedConfig) and one.__module__ != "transformers"
    ]
    names = re.findall(r"@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)", path.read_text())
    return [(getattr(module, name), sorted(configs, key=lambda one: "Text" not in one.__name__)) for name in names]


def _built(kind: Any, configs: list[Any]) -> Any:
    """A small one; None where no configuration fits."""
    for config_class in configs:
        try:
            config = config_class()
            for key, value in _SMALL.items():
                if hasattr(config, key):
                    with contextlib.suppress(errors.StrictDataclassError):  # one number per layer, say: stays as it is
                        setattr(config, key, value)
            config._experts_implementation = "eager"
            wants = list(inspect.signature(kind.__init__).parameters)[2:]
            return kind(config, 12) if any("size" in name for name in wants) else kind(config)
        except (AttributeError, TypeError, ValueError, errors.StrictDataclassError):
            continue  # the configuration of another part
    return None


def _results(experts: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    width = getattr(experts, "hidden_dim", None) or getattr(experts, "hidden_size", None) or 16
    x, weights = torch.randn(7, width, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    index = torch.rand(7, 4).argsort(dim=1)[:, :2]
    out = experts(x, index, weights)
    return [out, *torch.autograd.grad(out.square().sum(), [x, weights, *experts.parameters()])]


@pytest.mark.slow
def test_every_class_of_experts() -> None:
    compared = 0
    for path in _files():
        for kind, configs in _classes(path):
            experts = _built(kind, configs)
            assert experts is not None, f"{kind.__name__}: no configuration fits; say how to build a small one"
            torch.manual_seed(0)
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            assert is_stack(experts) and lacks(experts, stack_rows(experts)) is None, kind.__name__
            expected = _results(experts)
            spread(experts, Spread.of(experts, 1))
            torch.testing.assert_close(
                _results(experts), expected, rtol=1e-4, atol=1e-5, msg=lambda text, kind=kind: f"{kind}: {text}"
            )
            compared += 1
    assert compared > 20
