"""LAMB's trust ratio is that of the whole parameter, however many ranks share the layer."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import NotYetSupportedError
from deepspeed.ops.lamb import FusedLamb
from tests.harness import on_ranks
from tests.harness.training import train_like
from tests.parallel.tensor import support
from tests.parallel.tensor.support import config, llama, loss_of

STEPS = 3


def lamb(parameters) -> FusedLamb:
    """Its eps is large beside rounding, as support.adamw's: the gradient of a key's bias is nothing but rounding."""
    return FusedLamb(list(parameters), lr=3e-2, eps=1e-3, weight_decay=0.1, max_coeff=5.0, min_coeff=0.05)


@pytest.mark.parametrize(
    ("ranks", "size", "stages"),
    [
        pytest.param(2, 2, (3,), id="two ranks"),
        pytest.param(4, 2, (0, 2, 3), id="and two with other samples"),
        pytest.param(4, 4, (2,), id="ranks that share a key/value head"),
    ],
)
@on_ranks()
def test_it_trains_like_plain_torch(size: int, stages: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    data = dist.get_world_size() // size
    expected = support.plain_run(llama(), STEPS, data, optimizer=lamb)
    for stage in stages:
        model = llama()
        engine = deepspeed.initialize(model=model, optimizer=lamb(model.parameters()), config=config(size, stage))[0]
        train_like(engine, expected, loss_of, rank // size, rel=1e-4, what=stage)
        full = engine._consolidated_16bit_state_dict()
        for name, value in expected.state.items() if full is not None else ():
            torch.testing.assert_close(
                full[name],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text: f"stage {stage}, {name}: {text}",  # noqa: B023
            )
        engine.destroy()


@on_ranks(2)
def test_others_that_need_whole_tensors_are_refused() -> None:
    for name in ("Muon", "OneBitLamb"):
        settings = config(2, 1, optimizer={"type": name, "params": {"lr": 1e-2}})
        settings.pop("gradient_clipping")
        with pytest.raises(NotYetSupportedError, match=f"{name} works on whole tensors.*tensor parallelism .* Lamb"):
            deepspeed.initialize(model=llama(), config=settings)
