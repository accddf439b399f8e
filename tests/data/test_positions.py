"""Where all ranks stand is read from a loader's state."""

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.positions import has_shared_order, shared_position
from tests.checkpoint.test_shared_positions import ByLength, Stateful


def test_the_position_in_the_state_of_worker_processes_is_found_too():
    data = torch.arange(40.0)
    loader = Stateful(data, batch_size=3, sampler=DistributedSampler(data, 2, 0))
    state = {"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 1}
    assert shared_position(loader, state) == {"epoch": 1, "samples": 30, "batch_size": 3}
    assert shared_position(loader, {"_num_yielded": 7})["samples"] == 40  # the last batch is smaller
    assert shared_position(loader, {"_num_yielded": 7, "_iterator_finished": True}) == {"epoch": 1, "samples": None}
    assert shared_position(loader, {"given": 7}) is None


def test_which_loaders_may_share_an_order():
    data = torch.arange(40.0)
    share = DistributedSampler(data, 2, 0)
    assert has_shared_order(Stateful(data, batch_size=3, sampler=share))
    assert has_shared_order(Stateful(data, batch_size=3, sampler=ByLength(data, 2, 0, 1)))
    assert has_shared_order(Stateful(data, batch_sampler=BatchSampler(share, 3, False)))

    class Buckets(BatchSampler):
        """Batches of the program, of any sizes."""

    assert not has_shared_order(Stateful(data, batch_sampler=Buckets(share, 3, False)))
    assert not has_shared_order(Stateful(data, batch_size=3, shuffle=True))
    assert not has_shared_order(DataLoader(data, batch_size=3, sampler=share))
