"""examples/cifar10: the network by the deepspeed command, by torchrun, and as a job on two nodes."""

import json
import pickle
import re
import runpy
import sys

import numpy as np
import pytest

from tests.examples.support import EXAMPLES, Desk, commands_of

ACCURACY = re.compile(r"right on ([\d.]+) % of the test pictures")


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, "cifar10")


def test_data_has_the_format_of_the_published_files(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "cifar10" / "cifar10_data.py"))
    with pytest.raises(FileNotFoundError, match="there is no CIFAR-10 in .* python cifar10_data.py"):
        example["Cifar10"](tmp_path)
    example["make"](tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names[:-1]:
        batch = pickle.loads((folder / name).read_bytes())
        assert sorted(batch) == ["batch_label", "data", "filenames", "labels"]
        assert batch["data"].shape == (800, 3072) and batch["data"].dtype == np.uint8
        assert len(batch["labels"]) == 800 and set(batch["labels"]) == set(range(10))
    assert len(pickle.loads((folder / "batches.meta").read_bytes())["label_names"]) == 10
    picture, label = example["Cifar10"](tmp_path, train=False)[0]
    assert picture.shape == (3, 32, 32) and -1 <= picture.min() < picture.max() <= 1 and label in range(10)


@pytest.mark.parametrize(
    ("pictures_per_file", "last_loss"), [(160, 2.2), pytest.param(800, 1.5, marks=pytest.mark.slow)]
)
def test_deepspeed_command(pictures_per_file, last_loss, desk):
    line = "deepspeed --num_gpus 2 cifar10.py --deepspeed --deepspeed_config ds_config.json --make_data"
    assert line in commands_of("cifar10")
    if pictures_per_file != 800:  # the command leaves a data set as it is
        example = runpy.run_path(str(EXAMPLES / "cifar10" / "cifar10_data.py"))
        example["make"](desk.folder / "data", pictures_per_file=pictures_per_file)
    shown = desk.run(f"{line} --epochs 1 --log_every {pictures_per_file // 16}")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", shown)]
    assert len(losses) == 5 and losses[0] > 2.0 and losses[-1] < last_loss
    assert float(ACCURACY.search(shown)[1]) > 40


@pytest.mark.slow
def test_torchrun(desk):
    line = "torchrun --nproc-per-node 2 cifar10.py --deepspeed_config=./ds_config.json --make_data"
    assert line in commands_of("cifar10")
    assert float(ACCURACY.search(desk.run(f"{line} --epochs 1"))[1]) > 40


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="job files are for Linux clusters")
def test_job_on_two_nodes(desk):
    assert "sbatch deepspeed-example.sh --make_data" in commands_of("cifar10")
    shown = desk.sbatch("deepspeed-example.sh", "--make_data", "--epochs", "1")
    assert "r0 master" in shown and "r1 master" in shown
    assert float(ACCURACY.search(shown)[1]) > 40
    assert len(ACCURACY.findall(shown)) == 1, "one rank of four reports"


def test_the_configuration_is_the_one_of_the_cluster_page():
    from tests.config.test_integrations import CLUSTER_PAGE

    assert json.loads((EXAMPLES / "cifar10" / "ds_config.json").read_text()) == CLUSTER_PAGE
