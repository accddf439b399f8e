"""Models that do odd things with their parameters, against plain torch; what cannot be right is refused by name."""

import pytest
import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.zero.gather.beside_torch import STAGE_3, compare


def _loss(model, step, of):
    return model(inputs(step, of))


# -- dtypes ----------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A complex weight, which may be frozen but not trained, and frozen parameters of other dtypes."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        turn = torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float())
        self.turn = nn.Parameter(turn, requires_grad=is_trained)
        self.keep = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH, dtype=torch.int16), requires_grad=False)
        self.exact = nn.Linear(WIDTH, WIDTH).double()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.exact(self.mix(x).double()).float()
        return ((x * self.turn).real * self.order)[:, self.keep].square().mean()


@on_ranks(2)
def test_unusual_dtypes_stay_as_they_are_and_complex_ones_are_not_trained():
    def check(engine):
        for name, counted, formula, _ in engine.memory_report():
            assert counted == formula, name

    compare(lambda: Turned(False), _loss, stages=[(1, {}), *STAGE_3], ready=check, tolerance={"rtol": 1e-4})
    for stage in (0, 3):
        with pytest.raises(
            DeepSpeedConfigError, match=r"parameter 'turn' \(param group 0\) is torch.complex64; expected"
        ):
            engine_of(Turned(True), stage)
    engine = engine_of(Turned(False), 3)
    engine.module.turn.requires_grad_(True)
    with pytest.raises(DeepSpeedConfigError, match="complex64 and cannot be trained from now on"):
        engine.backward(engine(inputs(0, rank())))


@on_ranks(2)
def test_attention_evaluates():
    """Fast paths of attention in evaluation read all parameters of a block at once."""
    torch.manual_seed(3)
    kind = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(kind, 2, enable_nested_tensor=False)
    torch.manual_seed(3)
    kind = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
    engine = engine_of(nn.TransformerEncoder(kind, 2, enable_nested_tensor=False), 3)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(rank()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(engine.eval()(x), plain.eval()(x))
