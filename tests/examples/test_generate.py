"""The quickstart for inference: four widths from one file, and text that is the model's own.

tests/project/test_smoke.py starts the program as a user does.
"""

import contextlib
import io
import runpy

import torch
from safetensors.torch import save_file

from tests.examples.support import EXAMPLES, run_script
from tests.harness import on_ranks, run_ranks

FOLDER = EXAMPLES / "quickstart"
CHECK = """
import torch
import generate, train
torch.manual_seed(0)
model = train.GPT(64, 2, 2)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(3)
model.device = torch.device("cpu")
assert generate.write(model, b"def main(", 12) == train.generate(model, b"def main(", 12)
assert len(generate.write(model, b"def", 2 * train.CONTEXT)) == 3 + 2 * train.CONTEXT
"""


@on_ranks(1)
def test_the_text_is_that_of_the_model_without_a_cache(tmp_path) -> None:
    script = tmp_path / "check.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{CHECK}")
    run_script(script)


def _printed(*arguments):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_script(FOLDER / "generate.py", *arguments)
    return output.getvalue()


def test_one_checkpoint_in_four_widths(tmp_path):
    model = runpy.run_path(str(FOLDER / "train.py"))["GPT"]
    torch.manual_seed(0)
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "text.py").write_text("print('a line of text')\n" * 50_000)
    weights = ["--weights", str(tmp_path / "model.safetensors")]
    (printed,) = run_ranks(_printed, 1, *weights, "--text", str(tmp_path), "--sample", "4")
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] and line.split()[0] in sizes(13.2)]
    assert [row[0] for row in rows] == list(sizes(13.2))
    for row in rows:
        assert abs(float(row[1]) - sizes(13.2)[row[0]]) < 0.2, row
        assert float(row[2]) > 0 and abs(float(row[-1]) - float(rows[0][-1])) < 0.05


def sizes(fp32):
    """MB of the weights: nearly all are those of linear layers."""
    return {"fp32": fp32, "bf16": fp32 / 2, "int8": fp32 / 4 + 0.2, "int4": fp32 / 7.1 + 0.2}
