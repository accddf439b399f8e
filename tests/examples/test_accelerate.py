"""examples/accelerate: one script by four configurations, its two kinds of weights, and the configuration it shows."""

import importlib.util
import json
import re

import pytest
import torch

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.examples.support import Desk, commands_of
from tests.harness import assert_states_equal

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("accelerate", "transformers")
]

SHORT = "--num_pieces 128 --num_epochs 2 --per_device_batch_size 8"


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, "accelerate")


def _launch(desk, config, *more):
    """The page's command for a machine without a GPU, in short."""
    line = f"accelerate launch --config_file {config} ../on_cpu.py train_lm.py"
    assert any(known.startswith(line) for known in commands_of("accelerate"))
    shown = desk.run(f"{line.replace('launch', 'launch --main_process_port 0')} {' '.join(more)} {SHORT}")
    return shown, [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+)", shown)]


@pytest.mark.slow
def test_stage_3_with_offload_by_config_file(desk):
    shown, losses = _launch(desk, "file_stage3_offload.yaml", "--output_dir", "out")
    assert "2 rank(s), ZeRO stage 3" in shown and losses[1] < losses[0] < 6
    weights = desk.folder / "out" / "weights_16bit"
    assert (weights / "model.safetensors").exists() and (weights / "config.json").exists()
    assert (desk.folder / "out" / "checkpoint" / "zero_to_fp32.py").exists()
    _check_weights(desk)


def _check_weights(desk):
    """Both kinds of weights load without deepspeed's engine and agree."""
    from transformers import AutoModelForCausalLM

    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    model = AutoModelForCausalLM.from_pretrained(desk.folder / "out" / "weights_16bit", dtype=torch.float32)
    half = {name: value.clone() for name, value in model.state_dict().items()}
    model = load_state_dict_from_zero_checkpoint(model, str(desk.folder / "out" / "checkpoint"))
    for name, value in model.state_dict().items():
        assert torch.equal(value.half(), half[name].half()), name


@pytest.mark.slow
@pytest.mark.parametrize("config", ["plugin_stage2.yaml", "plugin_stage3_offload.yaml", "file_stage2.yaml"])
def test_the_other_configurations(config, desk):
    shown, losses = _launch(desk, config, "--output_dir", "out")
    assert f"ZeRO stage {re.search(r'stage([23])', config)[1]}" in shown and losses[1] < losses[0] < 6
    _check_weights(desk)


@pytest.mark.slow
def test_optimizer_or_schedule_alone_in_the_file(desk):
    """The other combinations of the page, made from the same file."""
    path = desk.folder / "zero_stage2_config.json"
    whole = json.loads(path.read_text())
    for left_out in ("optimizer", "scheduler"):
        path.write_text(json.dumps({name: value for name, value in whole.items() if name != left_out}))
        _, losses = _launch(desk, "file_stage2.yaml")
        assert losses[1] < losses[0] < 6


@pytest.mark.slow
def test_inference_with_saved_weights(desk):
    _launch(desk, "plugin_stage3_offload.yaml", "--output_dir", "out")
    (line,) = [line for line in commands_of("accelerate") if "zero_to_fp32.py" in line]
    desk.run(line)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(desk.folder / "out" / "checkpoint"))
    written = torch.load(desk.folder / "fp32" / "pytorch_model.bin", weights_only=True)
    assert_states_equal(dict(written), dict(weights))
    (line,) = [line for line in commands_of("accelerate") if "--only_evaluate" in line]
    shown = desk.run(f"{line} {SHORT}")
    assert 1 < float(re.search(r"loss (\d\.\d+) nats per byte", shown)[1]) < 5.5


@pytest.mark.slow
def test_what_accelerate_hands_over(desk):
    lines = [line for line in commands_of("accelerate") if "show_config.py" in line]
    assert len(lines) == 3
    ambiguous, clear, flags = (line.replace("show_config.py", "../on_cpu.py show_config.py") for line in lines)
    shown = desk.run(ambiguous, fails=True)
    assert "When using `deepspeed_config_file`, the following accelerate config variables will be ignored" in shown
    assert "'zero_optimization': {'stage': 3" in desk.run(clear)
    shown = desk.run(flags)
    assert (
        "'fp16': {'enabled': True" in shown
        and "'stage': 3" in shown
        and "'gradient_accumulation_steps': 5" in shown
        and "'device': 'nvme'" in shown
    )
