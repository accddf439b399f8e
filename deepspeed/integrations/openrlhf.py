"""A strategy for OpenRLHF: the methods of its own one, on engines of this package.

OpenRLHF is imported when a method meets a model of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import deepspeed
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.errors import CheckpointError, DeepSpeedConfigError

_GIB = 2**30


class Strategy:
    """Trains the models of an OpenRLHF program with engines of this package.

    An ``Actor`` of OpenRLHF keeps its engine in ``actor.model``; any other model is replaced by its engine.

    Args:
        seed: Of all random generators, and of the order of samples.
        full_determinism: Use torch's deterministic operators.
        max_norm: Clip gradients to this norm; 0: do not.
        micro_train_batch_size: Samples of a micro-batch on each rank.
        train_batch_size: Samples of an update over all ranks.
        zero_stage: ZeRO stage of trained models; frozen models are sharded at stage 3 only.
        args: The program's options. Read are ``param_dtype`` (``"bf16"``, ``"fp16"`` or ``"fp32"``), ``adam_offload``,
            ``zpg``, ``grad_accum_dtype``, ``overlap_comm``, ``deepcompile``, ``ds_tensor_parallel_size``,
            ``use_dynamic_batch`` and ``local_rank``.

    Raises:
        DeepSpeedConfigError: ``args.ring_attn_size`` is above 1.
    """

    def __init__(
        self,
        seed: int = 42,
        full_determinism: bool = False,
        max_norm: float = 0.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        zero_stage: int = 2,
        args: Any = None,
    ) -> None:
        self.args = args
        self.seed = seed
        self.full_determinism = full_determinism
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.stage = zero_stage
        self.param_dtype = getattr(args, "param_dtype", "bf16")
        self.use_dynamic_batch = getattr(args, "use_dynamic_batch", False)
        self.ds_tensor_parallel_size = getattr(args, "ds_tensor_parallel_size", 1)
        self.ring_attn_size = getattr(args, "ring_attn_size", 1)
        self.ring_attn_rank = 0
        self.ring_attn_group = None
        self.is_rlhf = False
        self.world_size = 1
        self.accumulated_gradient = 1
        self.time_steps: dict[str, int] = defaultdict(int)
        if self.ring_attn_size > 1:
            raise DeepSpeedConfigError(
                f"ring_attn_size={self.ring_attn_size}: expected 1; this package divides sequences by the section "
                "sequence_parallel of a configuration"
            )

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """Seeds the generators and joins the ranks. Every rank must call it."""
        import random

        import numpy

        random.seed(self.seed)
        numpy.random.seed(self.seed)
        torch.manual_seed(self.seed)
        if self.full_determinism:
            torch.use_deterministic_algorithms(True)
        if getattr(self.args, "local_rank", -1) not in (-1, None):
            os.environ["LOCAL_RANK"] = str(self.args.local_rank)
        comm.init_distributed(timeout=timeout)
        self.world_size = comm.get_world_size()
        copies = self.world_size // self.ds_tensor_parallel_size
        self.accumulated_gradient = max(1, self.train_batch_size // self.micro_train_batch_size // copies)

    # -- training ---------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Returns an AdamW over the trained parameters; biases and norms have no weight decay.

        Args:
            model: Before :meth:`prepare`.
            **kwargs: ``lr``, ``betas``, ``weight_decay`` and more of the optimizer.
        """
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        decay = kwargs.pop("weight_decay", 0.0)
        named = [(name, one) for name, one in _inner(model).named_parameters() if one.requires_grad]
        decayed = [one for name, one in named if _decays(name)]
        others = [one for name, one in named if not _decays(name)]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        kind = DeepSpeedCPUAdam if getattr(self.args, "adam_offload", False) else FusedAdam
        return kind([group for group in groups if group["params"]], **kwargs)

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Makes engines. Every rank must call it with the same models in the same order.

        Args:
            *models_or_model_optim_pairs: ``(model, optimizer, scheduler)`` to train; a model to compute with alone;
                ``(None, None, None)`` or None, which stay.
            is_rlhf: Kept as ``is_rlhf``.

        Returns:
            A list of the same with engines; without the list, for one.
        """
        self.is_rlhf = is_rlhf
        prepared: list[Any] = []
        for one in models_or_model_optim_pairs:
            if isinstance(one, tuple):
                if len(one) != 3:
                    raise DeepSpeedConfigError(
                        f"prepare: expected (model, optimizer, scheduler), found a tuple of {len(one)}"
                    )
                prepared.append(one if one[0] is None else self._prepared(*one))
            else:
                prepared.append(None if one is None else self._prepared(one)[0])
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, model: Any, optimizer: Any = None, scheduler: Any = None) -> tuple[Any, Any, Any]:
        engine, wrapped, _, scheduler = deepspeed.initialize(
            model=_inner(model), optimizer=optimizer, lr_scheduler=scheduler, config=self._config(optimizer is not None)
        )
        if getattr(self.args, "deepcompile", False):
            engine.compile()
        if not _is_actor(model):
            return engine, wrapped, scheduler
        model.model = engine
        return model, wrapped, scheduler

    def _config(self, trains: bool) -> dict[str, Any]:
        args = self.args
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1 if self.use_dynamic_batch else self.micro_train_batch_size,
            "gradient_accumulation_steps": 1 if self.use_dynamic_batch else self.accumulated_gradient,
            "bf16": {"enabled": self.param_dtype == "bf16"},
            "fp16": {"enabled": self.param_dtype == "fp16"},
            "zero_optimization": {"stage": self.stage if trains or self.stage == 3 else 0},
        }
        if self.ds_tensor_parallel_size > 1:
            config["tensor_parallel"] = {"autotp_size": self.ds_tensor_parallel_size}
        if trains:
            zero = config["zero_optimization"]
            config["gradient_clipping"] = self.max_norm
            zero["overlap_comm"] = bool(getattr(args, "overlap_comm", False))
            zero["zero_hpz_partition_size"] = getattr(args, "zpg", 1)
            if getattr(args, "adam_offload", False):
                zero["offload_optimizer"] = {"device": "cpu"}
            if getattr(args, "grad_accum_dtype", None):
                config["data_types"] = {"grad_accum_dtype": args.grad_accum_dtype}
        return config

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Runs the backward pass of ``loss``. Every rank must call it."""
        _inner(model).backward(loss)

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **kwargs: Any) -> None:
        """Updates at the end of an accumulation, and advances the schedule. Every rank must call it."""
        _inner(model).step()

    def moving_average(self, model: Any, model_ema: Any, beta: float = 0.992, device: Any = "cpu") -> None:
        """Moves ``model_ema`` towards ``model``, once in an accumulation: ``ema = beta ema + (1 - beta) model``.

        Every rank must call it.
        """
        self.time_steps["ema"] += 1
        if self.time_steps["ema"] % self.accumulated_gradient and not self.use_dynamic_batch:
            return
        with torch.no_grad():
            for one, average in zip(_inner(model).parameters(), _inner(model_ema).parameters(), strict=True):
                if one.requires_grad:
                    with deepspeed.zero.GatheredParameters([one, average], modifier_rank=0):
                        mean = beta * average.data.float().to(device) + (1 - beta) * one.data.float().to(device)
                        average.data.copy_(mean)

    # -- data -------------------------------------------------------------------------------------------------------

    def setup_dataloader(
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = True,
        sampler: Any = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Returns a loader of this rank's samples; it leaves out the first ``consumed_samples`` of the first epoch."""
        if sampler is None and comm.is_initialized():
            copies = self.world_size // self.ds_tensor_parallel_size
            place = self.get_rank() // self.ds_tensor_parallel_size
            sampler = _ConsumedSampler(replay_buffer, copies, place, shuffle, self.seed, drop_last, consumed_samples)
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            shuffle=shuffle if sampler is None else False,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )

    # -- files ------------------------------------------------------------------------------------------------------

    def load_model(
        self,
        model: Any,
        path: str,
        map_location: Any = "cpu",
        strict: bool = False,
        key_replace_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """Loads a file of weights into a model, before or after :meth:`prepare`. Every rank must call it."""
        weights = torch.load(path, map_location=map_location, weights_only=True)
        if key_replace_fn:
            weights = key_replace_fn(weights)
        inner = _inner(model)
        if isinstance(inner, deepspeed.DeepSpeedEngine):
            inner.load_module_state_dict({"module": weights}, strict=strict)
        else:
            inner.load_state_dict(weights, strict=strict)

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Saves the weights in the compute dtype, by the model's ``save_pretrained``. Every rank must call it.

        Args:
            tokenizer: Saved beside the model; None: nothing is.
            output_dir: A folder, which is made.
            **kwargs: Of ``save_pretrained``.
        """
        weights = _inner(model)._consolidated_16bit_state_dict()
        if self.is_rank_0():
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            _inner(model).module.save_pretrained(output_dir, state_dict=clone_tensors_for_torch_save(weights), **kwargs)
            if tokenizer is not None:
                tokenizer.save_pretrained(output_dir)
        comm.barrier()

    def save_ckpt(
        self,
        model: Any,
        save_dir: str,
        tag: Any = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        **kwargs: Any,
    ) -> None:
        """Saves a checkpoint, after which at most ``max_num`` are in ``save_dir``. Every rank must call it.

        Args:
            max_mem: GiB that checkpoints may take; the oldest are deleted first, never the new one.
        """
        _inner(model).save_checkpoint(save_dir, tag=tag, client_state=client_state or {}, save_latest=save_latest)
        comm.barrier()
        if self.is_rank_0():  # afterwards, so that there is always one that is whole
            folders = (one for one in Path(save_dir).iterdir() if one.is_dir())
            found = sorted(folders, key=lambda one: one.stat().st_mtime)
            while len(found) > 1 and (len(found) > max_num or sum(map(_bytes_below, found)) > max_mem * _GIB):
                shutil.rmtree(found.pop(0))
        comm.barrier()

    def load_ckpt(
        self,
        model: Any,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **kwargs: Any,
    ) -> tuple[str, dict[str, Any]]:
        """Loads a checkpoint; returns its path and its client state. Every rank must call it.

        Raises:
            CheckpointError: There is none.
        """
        path, client_state = _inner(model).load_checkpoint(
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        if path is None:
            raise CheckpointError(f'load_ckpt(load_dir="{load_dir}"): expected a checkpoint, found none')
        return path, client_state or {}

    # -- ranks ------------------------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Returns the mean, sum or maximum over all ranks of a number, a tensor, or each value of a dict."""
        if op not in ("mean", "max", "sum"):
            raise DeepSpeedConfigError(f'all_reduce(op="{op}"): expected "mean", "max" or "sum"')
        if isinstance(data, dict):
            return {key: self.all_reduce(value, op) for key, value in data.items()}
        values = _on_device(data)
        if comm.is_initialized():
            comm.all_reduce(values, comm.ReduceOp.MAX if op == "max" else comm.ReduceOp.SUM)
        if op == "mean":
            values = values / self.world_size
        return values.to(data.device) if torch.is_tensor(data) else values.item()

    def all_gather(self, data: Any) -> Any:
        """Returns the values of all ranks, concatenated along dimension 0, of a number, a tensor, or each of a dict."""
        if isinstance(data, dict):
            return {key: self.all_gather(value) for key, value in data.items()}
        values = _on_device(data)
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        if comm.is_initialized():
            comm.all_gather(gathered, values)
        else:
            gathered = [values]
        return torch.cat(gathered).to(data.device if torch.is_tensor(data) else "cpu")

    def print(self, *msg: Any) -> None:
        """Prints on rank 0."""
        if self.is_rank_0():
            sys.stdout.write(" ".join(map(str, msg)) + "\n")

    def is_rank_0(self) -> bool:
        """Returns whether this is rank 0."""
        return self.get_rank() == 0

    def get_rank(self) -> int:
        """Returns this rank's number."""
        return comm.get_rank() if comm.is_initialized() else 0


class _ConsumedSampler(DistributedSampler):
    """Yields a rank's samples, without the first ones of the epoch at which a run resumes."""

    def __init__(
        self, data: Any, copies: int, place: int, shuffle: bool, seed: int, drop_last: bool, consumed: int
    ) -> None:
        super().__init__(data, copies, place, shuffle, seed, drop_last)
        self._consumed = consumed // copies

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[self._consumed :])

    def __len__(self) -> int:
        return super().__len__() - self._consumed

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Sets the epoch, and how many samples of it all ranks together have consumed."""
        super().set_epoch(epoch)
        self._consumed = consumed_samples // self.num_replicas


def _is_actor(model: Any) -> bool:
    """Returns whether a model is OpenRLHF's ``Actor``; where that was never imported, no model is."""
    models = sys.modules.get("openrlhf.models")
    return models is not None and isinstance(model, models.Actor)


def _inner(model: Any) -> Any:
    """Returns the model inside an ``Actor``, which may be an engine; any other model as it is."""
    return model.model if _is_actor(model) else model


def _decays(name: str) -> bool:
    return not (name.endswith(".bias") or "norm" in name.lower())


def _on_device(data: Any) -> torch.Tensor:
    values = data if torch.is_tensor(data) else torch.tensor([data], dtype=torch.float32)
    return values.detach().clone().to(get_accelerator().current_device_name())


def _bytes_below(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
