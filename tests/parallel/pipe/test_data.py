"""Ranks of one copy of a pipeline that have other samples than the rest are named before anything is computed."""

import torch
from torch.nn import functional

from deepspeed.comm.job.mesh import Mesh
from deepspeed.parallel.pipe.data import different_samples, fingerprints
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.parallel.pipe.test_never_hang import SOON, engine_of, linears, raised_by

SAMPLES = [(torch.full((2, 4), number + 2.0), torch.full((2, 4), number + 3.0)) for number in range(4)]


def _row(*items):
    return (*fingerprints(items), True)


def test_what_distinguishes_samples():
    x, y = torch.randn(3, 5), torch.arange(6)
    assert fingerprints([(x, y)]) == fingerprints([({"x": x.clone()}, (None, [y.clone()]))])
    for other in (x + 1e-6, x.bfloat16(), -x, x.flip(0)):
        mine, theirs = fingerprints([(x, y)]), fingerprints([(other, y)])
        assert mine[0] != theirs[0] and mine[1] == theirs[1]
    assert fingerprints([(x, y), (y, x)]) != fingerprints([(y, x), (x, y)])
    assert fingerprints([(None, 0), (torch.zeros(9), torch.ones(2, dtype=torch.bool)), torch.ones(3)]) == (0, 0)


def test_who_must_have_the_same():
    one, two = SAMPLES[:2]
    stages, shared = Mesh((("pipe", 2),)), Mesh((("pipe", 2), ("tensor", 2)))
    for first, second in ((one, one), (one, (None, two[1])), (one, (torch.zeros(2), two[1])), (one, (two[0], one[1]))):
        assert different_samples([_row(first), _row(second)], stages) is None
    assert "0 (stage 0) and 1 (stage 1)" in different_samples([_row(one), _row(two)], stages)
    # Ranks that share a layer use the inputs, or the labels, of their stage, each its own.
    assert different_samples([_row(one)] * 4, shared) is None
    text = different_samples([_row(one), _row((two[0], one[1])), _row(one), _row(one)], shared)
    assert text == "the ranks 0 and 1 share the layers of stage 0, but have different inputs"
    text = different_samples([_row(one), _row(one), _row(one), _row((one[0], two[1]))], shared)
    assert text == "the ranks 2 and 3 share the layers of stage 1, but have different labels"
    # Copies of the model have samples of their own, and a rank without items logs nothing.
    assert different_samples([_row(one), _row(two), _row(one), _row(two)], Mesh((("pipe", 2), ("data", 2)))) is None
    assert different_samples([_row(one), (*fingerprints([two]), False)], stages) is None


@on_ranks(2)
def test_loaders_in_another_order() -> None:
    engine = engine_of(linears(2), 2, 2, loss_fn=functional.mse_loss)
    order = SAMPLES if engine.is_first_stage() else SAMPLES[::-1]
    text, seconds = raised_by(lambda: engine.train_batch(iter(order)))
    loss = engine.train_batch(iter(SAMPLES)).item()  # nothing was computed, so the engine continues
    assert "0 (stage 0) and 1 (stage 1) work on one copy of the model, but have different samples" in text
    assert seconds < SOON and loss > 0


def _loaders():
    engine = engine_of(linears(2), 2, 2, loss_fn=functional.mse_loss)
    seen: list[float] = []

    def note(item):
        seen.append(item[0].flatten()[0].item() - 2)
        return item

    engine.set_batch_fn(note)
    loader = torch.utils.data.DataLoader(SAMPLES[:3], batch_size=None)
    for source in (loader, loader, loader, SAMPLES, SAMPLES, loader, None):
        engine.train_batch(source)
    engine.eval_batch(loader)
    engine.train_batch(loader)
    return seen


def test_a_loader_continues_and_a_list_begins_again():
    expected = [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 0, 0, 1, 1, 2]
    assert run_ranks(_loaders, 2) == [expected, expected]
