"""The first ``initialize`` of a plain model loads nothing that neither its configuration nor it asks for."""

import importlib.util
import json
import subprocess
import sys

import pytest

from deepspeed.engine.features import FEATURES

PLAIN = """
import json, sys, torch, deepspeed
for stage in range(4):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 5, dtype=torch.bfloat16)).sum())
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()
    print("loaded:" + json.dumps(sorted(sys.modules)))
"""

# Loading it takes torch longer than all else that initialize does; only what compiles needs it.
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")

# Every engine has timers, so of this package only the feature is seldom needed.
PARTLY_NEEDED = "deepspeed.profiling"

# What few models need: the engine loads it when the configuration or the model asks for it.
SELDOM = (
    *(name for name in FEATURES if name.endswith(".feature")),
    *({name.removesuffix(".feature") for name in FEATURES if name.endswith(".feature")} - {PARTLY_NEEDED}),
    "deepspeed.engine.generation",
    "deepspeed.engine.hybrid",
    "deepspeed.engine.pipeline",
    "deepspeed.data",
    "deepspeed.ops.lamb",
    "deepspeed.ops.lion",
    "deepspeed.ops.muon",
    "deepspeed.ops.onebit.adam",
    "deepspeed.ops.sparse_attention",
    "deepspeed.activation_checkpointing",
    "deepspeed.inference",
    "deepspeed.plan",
    "deepspeed.zero.onebit",
    "rich",
)


@pytest.fixture(scope="module")
def loaded() -> list[list[str]]:
    """Modules in one fresh process after training at each stage, one after the other."""
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("loaded:")]
    return [json.loads(line.removeprefix("loaded:")) for line in lines]


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_plain_model_loads_no_more_than_it_needs(stage, loaded):
    assert "deepspeed.zero.runtime" in loaded[stage]
    extra = [name for name in loaded[stage] for seldom in (*COMPILER, *SELDOM) if f"{name}.".startswith(f"{seldom}.")]
    assert extra == []


def test_what_is_loaded_seldom_exists():
    """What the test above and the engine know by name is there to be loaded."""
    missing = [name for name in (*COMPILER, *SELDOM) if importlib.util.find_spec(name) is None]
    assert missing == []
