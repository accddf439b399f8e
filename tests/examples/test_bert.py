"""examples/bert: the plain script, the converted one, and both going on from their checkpoints."""

import contextlib
import difflib
import importlib.util
import io
import json
import math
import os
import re

import pytest

from tests.examples.support import EXAMPLES, Desk, commands_of, run_script
from tests.harness import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

SMALL = "--max_seq_length 32 --num_layers 2 --num_heads 2 --h_dim 32 --ff_dim 64 --dropout 0"
SHORT = f"{SMALL} --num_iterations 8 --checkpoint_every 4 --log_every 4"


def _losses(shown):
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\d+\.\d+)", shown)}


def _shown(script, *arguments):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_script(EXAMPLES / "bert" / script, *arguments)
    return output.getvalue()


def _both(folder):
    os.chdir(folder)
    short = SHORT.split()
    shown = {
        "plain": _shown("train_bert.py", "--checkpoint_dir", f"plain-{os.environ['RANK']}", *short),
        "ds": _shown("train_bert_ds.py", "--checkpoint_dir", "ds", *short),
    }
    # Both stop after four steps and continue: the later losses are the same.
    for kind, script in (("plain", "train_bert.py"), ("ds", "train_bert_ds.py")):
        place = "ds" if kind == "ds" else f"plain-{os.environ['RANK']}"
        if kind == "ds":
            if os.environ["RANK"] == "0":
                (folder / "ds" / "latest").write_text("global_step4")
            import torch.distributed as dist

            dist.barrier()
        else:
            (folder / place / "checkpoint.iter_7.pt").unlink()
        shown[f"{kind} resumed"] = _shown(script, "--load_checkpoint_dir", place, *short)
    return shown


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_before_and_after_conversion(ranks, tmp_path):
    shown = run_ranks(_both, ranks, tmp_path)[0]
    plain, converted = _losses(shown["plain"]), _losses(shown["ds"])
    # Eight steps are too few to learn from: every token is still about equally likely.
    assert [*plain.values(), *converted.values()] == pytest.approx([math.log(4096)] * 4, abs=0.4)
    if ranks == 1:
        assert converted == pytest.approx(plain, rel=2e-3), "the same batches, in fp16 instead of fp32"
    for kind in ("plain", "ds"):
        assert "going on after step 4" in shown[f"{kind} resumed"]
        assert _losses(shown[f"{kind} resumed"]) == {8: _losses(shown[kind])[8]}
    names = sorted(path.name for path in (tmp_path / "ds").iterdir())
    assert {"global_step4", "global_step8", "latest", "zero_to_fp32.py"} <= set(names)


@pytest.mark.slow
def test_commands_of_the_page(tmp_path):
    desk = Desk(tmp_path, "bert")
    commands = commands_of("bert")
    plain = "python train_bert.py --checkpoint_dir experiments --num_iterations 1000 --local_rank 0 --log_every 500"
    converted = "deepspeed train_bert_ds.py --checkpoint_dir experiments --num_iterations 1000 --log_every 500"
    assert plain in commands and converted in commands
    for line in (plain, converted, converted.replace("deepspeed ", "deepspeed --num_gpus 2 ")):
        losses = _losses(desk.run(f"{line} {SHORT}"))
        assert sorted(losses) == [4, 8] and losses[8] == pytest.approx(math.log(4096), abs=0.4)


def _long(folder):
    os.chdir(folder)
    short = (
        f"{SMALL.replace('_length 32', '_length 128')} --num_iterations 8 --checkpoint_every 4 --log_every 2".split()
    )
    whole = _shown("train_bert_long.py", "--checkpoint_dir", "long", *short)
    if os.environ["RANK"] == "0":
        (folder / "long" / "latest").write_text("global_step4")
    import torch.distributed as dist

    dist.barrier()
    return whole, _shown("train_bert_long.py", "--load_checkpoint_dir", "long", *short)


def test_long_sequences_with_sparse_attention_and_a_curriculum(tmp_path):
    whole, resumed = run_ranks(_long, 1, tmp_path)[0]
    losses = _losses(whole)
    assert list(losses.values()) == pytest.approx([math.log(4096)] * 4, abs=0.4)
    lengths = re.findall(r"length (\d+)", whole)
    assert lengths == ["72", "128", "128", "128"] and re.findall(r"length (\d+)", resumed) == lengths[2:]
    assert _losses(resumed) == {step: losses[step] for step in (6, 8)}


def test_the_conversion_changes_few_lines():
    """The page shows the difference of the two scripts; it is what stands there."""
    before, after = (
        (EXAMPLES / "bert" / name).read_text().splitlines() for name in ("train_bert.py", "train_bert_ds.py")
    )
    changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:1] in "+-"]
    assert 20 < len(changed) < 70
    config = re.search(r"ds_config = (\{.*?\n    \})", "\n".join(after), flags=re.DOTALL)[1]
    config = json.loads(re.sub(r",(\s*\})", r"\1", config.replace("args.batch_size", "8").replace("True", "true")))
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert config["fp16"] == {"enabled": True}
