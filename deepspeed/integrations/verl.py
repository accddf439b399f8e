"""An engine for verl: ``DeepSpeedEngine``, which is registered under the backend ``"deepspeed"`` when it is imported.

verl is imported then, not before. Its interface is ``verl.workers.engine.BaseEngine``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import deepspeed
from deepspeed import comm
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.models.pretrained import load_causal_model
from deepspeed.parallel.sequence.vocabulary import vocab_parallel_entropy, vocab_parallel_logprobs

MODEL_STATES = ("lp_params", "hp_params")
OPTIMIZER_STATES = ("optim_states",)
GRADIENTS = ("lp_grads", "contiguous_grad_buffer")


class VerlEngine:
    """The methods of verl's ``BaseEngine`` for a causal language model. Every rank must call each of them.

    Args:
        model_config: Of verl. Read are ``local_path``, ``hf_config``, ``trust_remote_code``,
            ``enable_gradient_checkpointing`` and, for PEFT's LoRA, ``lora_rank``, ``lora_alpha``, ``target_modules``
            and ``exclude_modules``. A ``module`` is used as it is, instead of the files of ``local_path``.
        engine_config: ``deepspeed``, a configuration (dict or path) of this package; what it leaves open comes from
            ``zero_stage`` (default 3), ``dtype`` (default ``"bfloat16"``), ``ulysses_sequence_parallel_size`` and the
            optimizer's settings. ``param_offload`` and ``optimizer_offload`` move states to the host between phases.
            ``forward_only`` makes no optimizer.
        optimizer_config: ``lr``, ``betas``, ``weight_decay``, ``clip_grad``, and for the schedule
            ``total_training_steps``, ``lr_warmup_steps``, ``lr_warmup_steps_ratio``, ``lr_scheduler_type``
            (``"constant"`` or ``"cosine"``) and ``min_lr_ratio``.
        checkpoint_config: Kept for verl; nothing here reads it.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any = None, checkpoint_config: Any = None
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        self._engine: Any = None
        self._updates = 0  # steps of the schedule
        self._asleep: set[str] = set()  # kinds of states on the host

    # -- construction -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Makes model, engine and optimizer."""
        config = self._config()
        stage = config.get("zero_optimization", {}).get("stage", 0)
        sharded = deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else nullcontext()
        with sharded:
            model = self._model()
        if _get(self.model_config, "lora_rank", 0) > 0:
            model = self._with_adapters(model)
        self._engine = deepspeed.initialize(model=model, config=config)[0]
        if not self._is_forward_only:
            self._set_lr()
        self._offload_between_phases()

    @property
    def _is_forward_only(self) -> bool:
        return bool(_get(self.engine_config, "forward_only", False))

    def _config(self) -> dict[str, Any]:
        found = _get(self.engine_config, "deepspeed", None) or {}
        if not isinstance(found, Mapping):
            import hjson

            found = hjson.loads(Path(found).read_text())
        config = dict(found)
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        config.setdefault("gradient_accumulation_steps", 1)  # verl's losses are parts of a sum over the whole batch
        config.setdefault("zero_optimization", {"stage": _get(self.engine_config, "zero_stage", 3)})
        if not {"bf16", "fp16"} & set(config):
            dtype = str(_get(self.engine_config, "dtype", "bfloat16")).removeprefix("torch.")
            config["bf16"] = {"enabled": dtype in ("bfloat16", "bf16")}
            config["fp16"] = {"enabled": dtype in ("float16", "fp16")}
        ranks = _get(self.engine_config, "ulysses_sequence_parallel_size", 1)
        if ranks > 1:
            config.setdefault("sequence_parallel_size", ranks)
        if config["gradient_accumulation_steps"] != 1:
            raise DeepSpeedConfigError(
                "engine_config.deepspeed: expected gradient_accumulation_steps=1, found "
                f"{config['gradient_accumulation_steps']}; verl divides batches by micro_batch_size_per_gpu"
            )
        if not self._is_forward_only:
            how = self.optimizer_config
            params = {"lr": _get(how, "lr", 1e-6), "weight_decay": _get(how, "weight_decay", 0.01)}
            params["betas"] = list(_get(how, "betas", (0.9, 0.999)))
            config.setdefault("optimizer", {"type": "AdamW", "params": params})
            config.setdefault("gradient_clipping", _get(how, "clip_grad", 1.0) or 0.0)
        return config

    def _model(self) -> torch.nn.Module:
        given = _get(self.model_config, "module", None)
        if given is not None:
            return given
        path = _get(self.model_config, "local_path", None) or _get(self.model_config, "path", None)
        if path is None:
            raise DeepSpeedConfigError("model_config: expected local_path, found none; set the folder of the model")
        return load_causal_model(
            path,
            _get(self.model_config, "hf_config", None),
            torch.float32,  # the engine's masters; it rounds to the compute dtype
            trust_remote_code=_get(self.model_config, "trust_remote_code", False),
            recomputes=_get(self.model_config, "enable_gradient_checkpointing", False),
        )

    def _with_adapters(self, model: torch.nn.Module) -> torch.nn.Module:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=_get(self.model_config, "lora_rank", 0),
                lora_alpha=_get(self.model_config, "lora_alpha", 16),
                target_modules=_get(self.model_config, "target_modules", None),
                exclude_modules=_get(self.model_config, "exclude_modules", None),
            ),
        )

    @property
    def module(self) -> Any:
        """The engine of this package, which verl calls the module."""
        if self._engine is None:
            raise CallOrderError("DeepSpeedEngine: initialize() was not called; call it first")
        return self._engine

    # -- phases -----------------------------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters leave the device between phases."""
        return bool(_get(self.engine_config, "param_offload", False))

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer states leave the device between phases."""
        return bool(_get(self.engine_config, "optimizer_offload", False))

    @contextmanager
    def train_mode(self, **kwargs: Any) -> Iterator[None]:
        """Trains inside: states are on the device. ``disable_auto_offload=True`` moves nothing."""
        with self._phase("train", **kwargs):
            try:
                yield
            finally:
                self.optimizer_zero_grad()

    @contextmanager
    def eval_mode(self, **kwargs: Any) -> Iterator[None]:
        """Evaluates inside: parameters are on the device. ``disable_auto_offload=True`` moves nothing."""
        with self._phase("eval", **kwargs):
            yield

    @contextmanager
    def _phase(self, mode: str, disable_auto_offload: bool = False, **_: Any) -> Iterator[None]:
        is_training = mode == "train"
        if not disable_auto_offload:
            self.to(_device_name(self.module), model=True, optimizer=is_training, grad=is_training)
        self.mode = mode
        self.module.train(is_training)
        try:
            yield
        finally:
            self.mode = None
            if not disable_auto_offload:
                self._offload_between_phases()

    def _offload_between_phases(self) -> None:
        self._move_out(
            (MODEL_STATES + GRADIENTS) * self.is_param_offload_enabled
            + OPTIMIZER_STATES * self.is_optimizer_offload_enabled
        )

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves states to the host (``"cpu"``) or back to the engine's device. Does nothing where that is a CPU.

        Raises:
            DeepSpeedConfigError: Another device.
        """
        own = _device_name(self.module)
        kinds = MODEL_STATES * model + OPTIMIZER_STATES * optimizer + GRADIENTS * grad
        name = str(device).partition(":")[0]
        if name not in (own, "cpu"):
            raise DeepSpeedConfigError(f'to(device="{device}"): expected "{own}" or "cpu"; pass one of them')
        if own == "cpu":
            self._move_in(self._asleep)
        elif name == "cpu":
            self._move_out(kinds)
        else:
            self._move_in(set(kinds))

    def _move_out(self, kinds: tuple[str, ...]) -> None:
        new = set(kinds) - self._asleep
        if new:
            self._asleep |= new
            self._engine.offload_states(include=sorted(new))

    def _move_in(self, kinds: set[str]) -> None:
        if self._asleep & kinds:
            stay, self._asleep = self._asleep - kinds, set()
            self._engine.reload_states()  # all kinds: what stays out goes back
            self._move_out(tuple(stay))

    # -- training ---------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        """Discards gradients."""
        self.module.zero_grad()

    def optimizer_step(self) -> float:
        """Updates, if gradients are finite, and returns their norm before clipping."""
        self.module.step()
        norm = self.module.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def lr_scheduler_step(self) -> float:
        """Advances the schedule and returns the learning rate."""
        self._updates += 1
        return self._set_lr()

    def _set_lr(self) -> float:
        how = self.optimizer_config
        total, warmup = _get(how, "total_training_steps", -1), _get(how, "lr_warmup_steps", -1)
        if warmup is None or warmup <= 0:
            warmup = int(_get(how, "lr_warmup_steps_ratio", 0.0) * max(total, 0))
        kind, least = _get(how, "lr_scheduler_type", "constant"), _get(how, "min_lr_ratio", 0.0) or 0.0
        if kind not in ("constant", "cosine"):
            raise DeepSpeedConfigError(f'optimizer_config.lr_scheduler_type="{kind}": expected "constant" or "cosine"')
        factor = min(1.0, self._updates / warmup) if warmup else 1.0
        if kind == "cosine" and self._updates >= warmup and total > warmup:
            progress = min(1.0, (self._updates - warmup) / (total - warmup))
            factor = least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
        lr = _get(how, "lr", 1e-6) * factor
        for group in self.module.basic_optimizer.param_groups:
            group["lr"] = lr
        return lr

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Runs the micro-batches of this rank's batch, forward and, unless ``forward_only``, backward.

        Args:
            data: A TensorDict, or a dict of tensors: ``input_ids`` and ``position_ids``, jagged or padded ``[samples,
                length]``, with padding ``attention_mask``; optional ``temperature``, ``micro_batch_size_per_gpu``,
                ``use_dynamic_bsz`` (by verl's own division) and ``calculate_entropy``. ``loss_mask`` counts the tokens
                of the batch for the loss: ``batch_num_tokens`` and ``dp_size`` are added for it.
            loss_function: Called with ``model_output``, ``data`` and ``dp_group``; returns the loss, to be averaged
                over the data-parallel ranks and summed over micro-batches, and a dict of metrics. May be None.

        Returns:
            ``{"model_output": ..., "loss": [...], "metrics": {name: [...]}}``: in ``model_output`` are ``log_probs``
            (and ``entropy``) in the shape of ``input_ids``, at each token that of the next one, 0 after the last.
        """
        group = self.get_data_parallel_group()
        found = {"dp_size": self.get_data_parallel_size()}
        if "loss_mask" in data.keys():
            mask = data["loss_mask"]
            tokens = (mask.values() if mask.is_nested else mask).sum().to(self.module.device)
            if comm.is_initialized():
                comm.all_reduce(tokens, group=group)
            found["batch_num_tokens"] = tokens.item()
        _assign(data, found)
        parts, restore = _micro_batches(data, group)
        outputs = [self._forward_step(part, loss_function, group, forward_only) for part in parts]
        return restore(outputs)

    def _forward_step(self, part: Any, loss_function: Any, group: Any, forward_only: bool) -> dict[str, Any]:
        with torch.set_grad_enabled(not forward_only):
            part = part.to(self.module.device) if hasattr(part, "to") else part
            inputs, width = _model_inputs(part)
            logits = self.module(**inputs, use_cache=False).logits
            temperature = _setting(part, "temperature", 1.0)
            if torch.is_tensor(temperature) and temperature.dim() == 1:
                temperature = temperature[:, None, None]
            logits = logits / temperature
            following = inputs["input_ids"].roll(-1, 1)
            after = torch.nn.functional.pad(inputs["attention_mask"][:, 1:], (0, 1)) != 0  # a token follows
            targets = following.masked_fill(~after, -100)
            results = {"log_probs": vocab_parallel_logprobs(logits, targets)}
            if _setting(part, "calculate_entropy", False):
                results["entropy"] = vocab_parallel_entropy(logits)
            results = {name: _as_given(values, width) for name, values in results.items()}
            loss, metrics = torch.zeros((), device=self.module.device), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=results, data=part, dp_group=group)
            elif not forward_only:
                raise DeepSpeedConfigError("forward_backward_batch(loss_function=None): expected forward_only=True")
        if not forward_only:
            self.module.backward(loss)
        detached = {name: values.detach() for name, values in results.items()}
        return {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}

    # -- weights and checkpoints --------------------------------------------------------------------------------------

    def get_per_tensor_param(self, base_sync_done: bool = False, **_: Any) -> tuple[Iterator[Any], dict | None]:
        """Returns a generator of all weights, on every rank, and PEFT's configuration as a dict; None without it.

        With adapters these are the base weights under the base model's names, and with ``base_sync_done`` the adapters
        alone, as PEFT names them. Every rank must go through all of it.
        """
        self._move_in(set(MODEL_STATES))
        peft_config = getattr(self.module.module, "peft_config", None)
        if peft_config is None:
            return self.module.export_weights(ranks="all"), None
        found = next(iter(peft_config.values())).to_dict()
        if base_sync_done:
            return self.module.export_weights(ranks="all", adapters="only"), found
        return self.module.export_weights(ranks="all", names=_base_name), found

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Computes without adapters inside: the reference of a model with LoRA."""
        model = self.module.module
        return model.disable_adapter() if hasattr(model, "peft_config") else nullcontext()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Saves all states below ``local_path``, and deletes the oldest there beyond ``max_ckpt_to_keep``.

        Raises:
            DeepSpeedConfigError: ``hdfs_path`` is given.
        """
        _refuse_hdfs("save_checkpoint", hdfs_path)
        self._move_in(self._asleep)
        self.module.save_checkpoint(
            local_path, tag=f"global_step_{global_step}", client_state={"verl_updates": self._updates}
        )
        if max_ckpt_to_keep and self.module.global_rank == 0:
            kept = sorted(Path(local_path).glob("global_step_*"), key=lambda path: path.stat().st_mtime)
            for old in kept[:-max_ckpt_to_keep]:
                shutil.rmtree(old)
        self._offload_between_phases()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Loads the latest checkpoint below ``local_path``, of any number of ranks.

        ``del_local_after_load`` has no effect: only copies of remote files would be deleted, and there are none.

        Raises:
            CheckpointError: There is none.
            DeepSpeedConfigError: ``hdfs_path`` is given.
        """
        _refuse_hdfs("load_checkpoint", hdfs_path)
        self._move_in(self._asleep)
        client_state = self.module.load_checkpoint(local_path, must_exist=True)[1] or {}
        self._updates = client_state.get("verl_updates", 0)
        if not self._is_forward_only:
            self._set_lr()
        self._offload_between_phases()

    # -- ranks ------------------------------------------------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        """Returns the number of ranks that get different samples."""
        return self.module.dp_world_size

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's number among them."""
        return self.module.get_data_parallel_rank()

    def get_data_parallel_group(self) -> Any:
        """Returns their torch process group; None is the default one."""
        return self.module.data_parallel_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Returns whether this rank is the first of those that compute the same samples."""
        group = self.module.get_sequence_parallel_group()
        return self.module.get_model_parallel_rank() == 0 and (group is None or comm.get_rank(group) == 0)


if TYPE_CHECKING:
    DeepSpeedEngine = VerlEngine
else:

    def __getattr__(name: str) -> Any:
        if name == "DeepSpeedEngine":
            return _registered()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _registered() -> type:
    """Returns the class that verl knows, which derives from its ``BaseEngine``."""
    from verl.workers.engine import BaseEngine, EngineRegistry

    own = type("DeepSpeedEngine", (VerlEngine, BaseEngine), {"__doc__": VerlEngine.__doc__, "__module__": __name__})
    register = EngineRegistry.register(
        model_type="language_model", backend="deepspeed", device=["cuda", "npu", "xpu", "cpu"]
    )
    return register(own)


def _get(config: Any, name: str, default: Any) -> Any:
    """Returns a field of a dataclass or mapping of verl's; the default where it is missing or None."""
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if found is None else found


def _setting(data: Any, key: str, default: Any) -> Any:
    """Returns a value of a batch, outside of tensordict's wrapper for what is no tensor."""
    found = data[key] if key in data.keys() else default
    return found if torch.is_tensor(found) else getattr(found, "data", found)


def _assign(data: Any, values: dict[str, Any]) -> None:
    """Adds values that are no tensors to a batch."""
    for key, value in values.items():
        if hasattr(data, "set_non_tensor"):  # a TensorDict
            data.set_non_tensor(key, value)
        else:
            data[key] = value


def _micro_batches(data: Any, group: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the micro-batches of a batch, and a function that puts their outputs together."""
    size, is_dynamic = _setting(data, "micro_batch_size_per_gpu", None), _setting(data, "use_dynamic_bsz", False)
    if is_dynamic:
        from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

        parts, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        return parts, lambda outputs: postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
    samples = data["input_ids"].shape[0]
    size = size or samples
    return [_sliced(data, start, start + size) for start in range(0, samples, size)], _joined


def _sliced(data: Any, start: int, end: int) -> Any:
    if not isinstance(data, dict):
        return data[start:end]
    samples = data["input_ids"].shape[0]
    return {
        key: _rows(value, start, end) if torch.is_tensor(value) and value.dim() and value.shape[0] == samples else value
        for key, value in data.items()
    }


def _rows(values: torch.Tensor, start: int, end: int) -> torch.Tensor:
    if not values.is_nested:
        return values[start:end]
    return torch.nested.as_nested_tensor(list(values.unbind())[start:end], layout=torch.jagged)


def _joined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"model_output": {}, "loss": [one["loss"] for one in outputs], "metrics": {}}
    for name in outputs[0]["model_output"]:
        values = [one["model_output"][name] for one in outputs]
        if values[0].is_nested:
            rows = [row for each in values for row in each.unbind()]
            whole["model_output"][name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        else:
            whole["model_output"][name] = torch.cat(values)
    for one in outputs:
        for name, value in one["metrics"].items():
            whole["metrics"].setdefault(name, []).append(value)
    return whole


def _model_inputs(part: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Returns padded inputs of the model, and the lengths of samples if they were jagged."""
    ids = part["input_ids"]
    if not ids.is_nested:
        mask = part["attention_mask"] if "attention_mask" in part.keys() else torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in part.keys():
            inputs["position_ids"] = part["position_ids"]
        return inputs, None
    lengths = ids.offsets().diff()
    padded = torch.nested.to_padded_tensor(ids, padding=0)
    places = torch.arange(padded.shape[1], device=padded.device)
    return {"input_ids": padded, "attention_mask": (places < lengths[:, None]).long()}, lengths


def _as_given(values: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Returns values ``[samples, length]`` in the layout of the batch."""
    if lengths is None:
        return values
    rows = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _base_name(name: str) -> str | None:
    """Returns the name of a weight before PEFT wrapped the model; None for an adapter's."""
    if "lora_" in name or "modules_to_save" in name:
        return None
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _device_name(engine: Any) -> str:
    return str(engine.device.type)


def _refuse_hdfs(call: str, path: str | None) -> None:
    if path is not None:
        raise DeepSpeedConfigError(
            f'{call}(hdfs_path="{path}"): expected None; copy the folder local_path, or mount the file system'
        )
