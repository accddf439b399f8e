"""What losses and optimizers exchange is simulated where ranks do not exist, and is counted by its axis."""

import pytest
import torch
from torch.nn import functional

from deepspeed import comm
from deepspeed.comm.base.counters import counted
from deepspeed.comm.base.recorder import log
from deepspeed.comm.job.fake import FakeGroup
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import NotYetSupportedError
from deepspeed.ops.exchange import add_over_ranks, exchange_parts, largest_over_ranks
from deepspeed.parallel.sequence.loss import mean_loss
from deepspeed.parallel.sequence.vocabulary import vocab_sequence_parallel_cross_entropy
from deepspeed.plan import plan
from deepspeed.plan.environment import SimulatedJob

SEQUENCE, TENSOR = FakeGroup((0, 2)), FakeGroup((0, 1))


def world(backend: str) -> SimulatedJob:
    return SimulatedJob(0, Mesh((("sequence", 2), ("tensor", 2))), backend)


@pytest.mark.parametrize("own_share", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_loss_over_cut_tokens_and_words(backend: str, own_share: bool) -> None:
    logits, target = torch.randn(6, 2, 10, requires_grad=True), torch.randint(0, 20, (6, 2))
    with world(backend).as_current(), counted() as traffic:
        loss = vocab_sequence_parallel_cross_entropy(logits, target, SEQUENCE, TENSOR, own_share=own_share)
        assert loss.shape == (12, 2)
        mean_loss(loss[:6], target, SEQUENCE, own_share=own_share).backward()
        axes = {axis for _, axis in traffic.requested_along}
        assert axes == {"sequence", "tensor"}
        # Everybody's largest logit, sum and wanted logit of each token.
        assert traffic.requested_along["all_gather", "tensor"].nbytes == 2 * 3 * 12 * 4
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_alone_the_loss_is_that_of_torch() -> None:
    logits, target = torch.randn(6, 2, 10, dtype=torch.bfloat16, requires_grad=True), torch.randint(0, 10, (6, 2))
    target[0] = -100
    loss = vocab_sequence_parallel_cross_entropy(logits, target, None, reduction="mean", gather_sequence_loss=False)
    wanted = functional.cross_entropy(logits.float().view(-1, 10), target.view(-1))
    torch.testing.assert_close(loss, wanted)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logits)[0])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_optimizers_exchange_is_counted_under_its_axis(backend: str) -> None:
    with world(backend).as_current(), counted() as traffic:
        add_over_ranks(torch.zeros(4, dtype=torch.float64), axis_of(TENSOR, "tensor"), "the test")
        experts = axis_of(SEQUENCE, "ep_size_2")
        largest_over_ranks(torch.zeros(4, dtype=torch.float64), experts, "the test")
        exchange_parts(torch.empty(5), torch.empty(5), ([2, 3], [1, 4]), experts, "the test")
        assert {key: tally.nbytes for key, tally in traffic.requested_along.items()} == {
            ("all_reduce", "tensor"): 2 * 4 * 8,
            ("all_gather", "ep_size_2"): 2 * 4 * 8,
            ("all_to_all", "ep_size_2"): 4 * 4,  # what stays on this rank does not travel
        }


def test_groups_of_one_axis_have_channels_of_their_own() -> None:
    with world("gloo").as_current():
        first, second = (axis_of(FakeGroup(ranks), "tensor").channel() for ranks in [(0, 1), (0, 2)])
        assert first.transport.ranks == (0, 1) and second.transport.ranks == (0, 2)
        assert axis_of(FakeGroup((0, 1)), "tensor").channel() is first


class _Exchanging(torch.nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = super().forward(values)
        comm.all_reduce(output.detach())
        return output.sum()


def test_the_communication_log_does_not_record_what_is_simulated() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    comm.configure(enabled=True)
    try:
        plan(_Exchanging(4, 4), config, devices_per_node=2, inputs=torch.zeros(2, 4), suggest=False)
        assert log.enabled and not comm.has_comm_data()
    finally:
        comm.configure(enabled=False)


def test_torchs_own_collectives_are_simulated_or_refused_by_name() -> None:
    with world("gloo").as_current():
        whole = torch.zeros(4)
        comm.all_gather_into_tensor(whole, torch.ones(2), group=SEQUENCE)
        assert whole.tolist() == [1.0] * 4
        with pytest.raises(NotYetSupportedError, match="reduce_scatter_tensor between ranks is not simulated"):
            comm.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4), group=SEQUENCE)
        with pytest.raises(NotYetSupportedError, match="all_gather_object between ranks is not simulated"):
            comm.all_gather_object([None, None], 1, group=SEQUENCE)
        one, two = torch.zeros(1), torch.zeros(2)
        with pytest.raises(NotYetSupportedError, match="all_to_all between ranks is not simulated"):
            comm.all_to_all([one, one], [one, one], group=SEQUENCE)
        with pytest.raises(NotYetSupportedError, match="all_reduce_coalesced between ranks is not simulated"):
            comm.all_reduce_coalesced([one], group=SEQUENCE)
        with pytest.raises(NotYetSupportedError, match="all_gather_coalesced between ranks is not simulated"):
            comm.all_gather_coalesced([two], [one], group=SEQUENCE)
        with pytest.raises(NotYetSupportedError, match="recv between ranks is not simulated"):
            comm.recv(one, group=SEQUENCE)
