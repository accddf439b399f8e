"""Which parameters may share a run of a master bucket (``zero.update.masters``)."""

import torch

from deepspeed.zero.update.masters import _scalar_state


def test_parameters_of_one_run_share_step_counts_and_numbers_but_no_tensors_of_elements() -> None:
    moments = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    three = _scalar_state({"step": torch.tensor(3.0), "beta": 0.5, **moments})
    assert three == (("beta", 0.5), ("step", 3.0))
    assert three == _scalar_state({"beta": 0.5, "step": 3, "exp_avg": torch.zeros(9)}), "an int step is the same"
    assert three != _scalar_state({"step": torch.tensor(4.0), "beta": 0.5, **moments})
    assert _scalar_state({}) is None and _scalar_state(None) is None
    assert _scalar_state({"momentum_buffer": torch.ones(4)}) == ()
