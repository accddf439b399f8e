"""Makes stateful loaders of Accelerate resume in the order of their epoch, also on another number of ranks.

Accelerate saves how many batches a rank got, but not the number of the epoch, the state of the generator that ordered
the samples, or the global batch size. A resumed run would continue in the order of the first epoch, and at a wrong
position if the number of ranks or the micro-batch size has changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from logging import WARNING
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from deepspeed.logging import log_dist

_MODULE = "accelerate.data_loader"
_KEY = "deepspeed_position"


def patch_accelerate() -> None:
    """Patches stateful loaders of an imported Accelerate to save and restore their order, once."""
    module = sys.modules.get(_MODULE)
    shard: Any = getattr(module, "DataLoaderShard", None)
    load = getattr(shard, "load_state_dict", None)
    if load is None or not hasattr(shard, "_update_state_dict") or hasattr(load, "_follows_samples"):
        return
    shard.set_epoch = _wrap_set_epoch(shard.set_epoch)
    shard._update_state_dict = _wrap_update_state_dict(shard._update_state_dict)
    shard.load_state_dict = _wrap_load_state_dict(shard.load_state_dict)
    shard.load_state_dict._follows_samples = True


def _wrap_set_epoch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_epoch(self: Any, epoch: int) -> None:
        """Stores the state of the generator that orders the epoch. Called at the beginning of each epoch."""
        original(self, epoch)
        if self.use_stateful_dataloader:
            self._deepspeed_batches = self.__dict__.pop("_deepspeed_resumed", 0)
            self._deepspeed_order = _order_of_pass(self)

    return set_epoch


def _order_of_pass(loader: Any) -> dict[str, Any]:
    """Returns the states that determine the order of the pass that begins now."""
    sampler, base = _sampler_of(loader), loader.base_dataloader
    generator = getattr(sampler, "generator", None)
    if hasattr(sampler, "initial_seed"):  # it seeds its generator with this and the number of the pass
        return {"initial_seed": sampler.initial_seed}
    if not isinstance(sampler, RandomSampler):
        return {}
    # Accelerate reads the state of a new loader, by which torchdata begins the first pass; workers then read ahead.
    is_begun = bool(getattr(base, "_initial_iter_for_state_dict", None))
    if isinstance(generator, torch.Generator):
        return {"generator": _before_first(sampler) if is_begun and loader.num_workers else generator.get_state()}
    if is_begun and loader.num_workers:
        return {"generator": None}
    # The sampler draws its seed from torch's default generator, at its first batch.
    resumed = loader.__dict__.pop("_deepspeed_random", None)
    if resumed is not None:
        loader._deepspeed_present = torch.get_rng_state()
        torch.set_rng_state(resumed)
    return {"random": torch.get_rng_state(), "is_begun": is_begun}


def _before_first(sampler: RandomSampler) -> torch.Tensor | None:
    """Returns the state of the generator of ``sampler`` before the pass that workers have begun; None: unknown."""
    generator = torch.Generator().manual_seed(sampler.generator.initial_seed())
    found = generator.get_state()
    torch.randperm(len(sampler.data_source), generator=generator)
    return found if torch.equal(generator.get_state(), sampler.generator.get_state()) else None


def _wrap_update_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update_state_dict(self: Any) -> None:
        """Adds the position to the state. Called before each batch is yielded, and again after the last one."""
        original(self)
        present = self.__dict__.pop("_deepspeed_present", None)
        if present is not None:  # the first batch of a resumed pass was read
            torch.set_rng_state(present)
        order = self.__dict__.get("_deepspeed_order")
        if order is None:  # the pass began before the engine, or the loader is not stateful
            return
        is_end = bool(self.end_of_dataloader)
        self._deepspeed_batches += not is_end
        if is_end and "generator" in order:
            order = {"generator": _sampler_of(self).generator.get_state()}  # which orders the next pass
        # torchdata counts batches twice if a resumed stream reads them again.
        self.dl_state_dict = {
            **_with_batches(self.dl_state_dict, self._deepspeed_batches),
            _KEY: {
                "pass": self.iteration + is_end,
                "batches": self._deepspeed_batches,
                "samples_each": _samples_of_a_batch(self),
                "order": order,
            },
        }

    return update_state_dict


def _wrap_load_state_dict(original: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        position = state_dict.get(_KEY)
        if position is None:  # saved without an engine, or before the first batch
            original(self, state_dict)
            return
        own = {key: value for key, value in state_dict.items() if key != _KEY}
        saved_size, size, batches = position["samples_each"], _samples_of_a_batch(self), position["batches"]
        is_end = bool(own.get("_iterator_finished"))
        problem = _restore_order(self, position["order"], is_end=is_end)
        if saved_size != size and not is_end:
            batches, reason = _batches_at(batches, saved_size, size)
            own = _with_batches(own, batches)
            problem = problem or reason
        if problem:
            log_dist(
                "load_state: the samples of Accelerate's stateful loader are not those of an uninterrupted run: "
                f"{problem}",
                level=WARNING,
            )
        self.iteration = position["pass"]
        self._deepspeed_resumed = 0 if is_end else batches
        # At the end of a pass torchdata's workers read from the sampler once more, which advances its generator.
        original(self, {} if is_end and self.num_workers and "generator" in position["order"] else own)
        if not is_end and position["order"].get("is_begun"):
            present = torch.get_rng_state()
            self.base_dataloader.state_dict()  # begins the pass, as it did before the save
            torch.set_rng_state(present)
        self.dl_state_dict = {**own, _KEY: {**position, "batches": batches, "samples_each": size}}

    return load_state_dict


def _restore_order(loader: Any, order: dict[str, Any], *, is_end: bool) -> str:
    """Gives the next pass the order of a saved one; returns the reason if it cannot, otherwise an empty text."""
    sampler = _sampler_of(loader)
    if "initial_seed" in order and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = order["initial_seed"]
    elif order.get("generator") is not None and isinstance(sampler, RandomSampler):
        if sampler.generator is None:  # as on one rank
            sampler.generator = torch.Generator()
        sampler.generator.set_state(order["generator"])
    elif "random" in order and getattr(sampler, "generator", None) is None:
        if not is_end:  # otherwise the generator that Accelerate restores orders the next pass
            loader._deepspeed_random = order["random"]
    elif order and not is_end:
        return (
            "its order was drawn from torch's default generator on one rank, which no other rank knows. Use "
            "DataLoaderConfiguration(use_seedable_sampler=True)"
        )
    return ""


def _sampler_of(loader: Any) -> Any:
    batches = loader.batch_sampler
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


def _samples_of_a_batch(loader: Any) -> int | None:
    """Returns the samples in a batch of all ranks; None if the ranks do not share one order."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset):
        size = getattr(loader.batch_sampler, "batch_size", None)
        return None if size is None else int(loader.total_batch_size)
    stream: Any = dataset
    ranks = getattr(stream, "num_processes", None)  # set by Accelerate's wrapper, which divides one stream
    if ranks is not None:
        return int(stream.batch_size if stream.split_batches else stream.batch_size * ranks)
    is_alone = sys.modules["accelerate.state"].PartialState().num_processes == 1
    return int(loader.batch_size) if is_alone and not hasattr(stream, "state_dict") else None


def _batches_at(batches: int, saved_size: int | None, size: int | None) -> tuple[int, str]:
    """Returns the number of batches of another size up to the same sample, and a problem or an empty text.

    A size counts the samples of all ranks; None: the ranks do not share one order.
    """
    if saved_size is None or size is None:
        return (
            batches,
            "each rank has an order of its own, so the position is valid only for the same ranks and micro-batch size",
        )
    count, rest = divmod(batches * saved_size, size)
    if rest:
        return (
            count,
            f"{rest} samples are repeated, as {batches * saved_size} samples are not a multiple of a batch of {size}",
        )
    return count, ""


def _with_batches(state: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns a state of torchdata, changed to ``count`` batches in the present pass."""
    if "_num_yielded" in state:
        return {**state, "_num_yielded": count, "_sampler_iter_yielded": count}
    snapshot = state["_snapshot"]
    if snapshot["_snapshot_step"] + state["_steps_since_snapshot"] == count:
        return state
    main = {**snapshot["_main_snapshot"], "_sampler_iter_yielded": count}
    moved = {
        **snapshot,
        "_snapshot_step": count,
        "_last_yielded_worker_id": (count - 1) % main["_num_workers"],
        "_main_snapshot": main,
    }
    return {**state, "_snapshot": moved, "_steps_since_snapshot": 0}
