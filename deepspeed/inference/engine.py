"""The engine that :func:`deepspeed.init_inference` returns: generates with the model, checks prompts, takes times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.generation import takes_synced_gpus, with_cache
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.inference.config import InferenceSettings
from deepspeed.models.inputs import main_input_of


class InferenceEngine(nn.Module):
    """Runs a model for inference.

    The model's attributes are available on the engine: ``engine.config``, ``engine.device``.
    """

    def __init__(
        self, module: nn.Module, settings: InferenceSettings, *, mp_group: Any = None, runner: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.module = module  # the model
        self.mp_group = mp_group  # torch process group of the ranks that share every layer; None for one rank
        self.is_compiled = False  # whether :meth:`compile` was called
        self._config = settings.config
        self._longest = settings.longest_prompt
        # What forward calls: the model, or an engine of ZeRO. In a tuple, so that it is not registered as a submodule.
        self._runner: tuple[nn.Module, ...] = (runner,) if runner is not None else (module,)
        self._times: list[float] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "module":
                return getattr(self.module, name)
            if self._runner:
                raise
        raise CallOrderError("InferenceEngine: destroy() was called; call init_inference again")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward, without gradients."""
        runner = self._runner[0] if self._runner else self.module
        with torch.no_grad():
            if self._times is None:
                return runner(*args, **kwargs)
            start = _synchronized_time()
            outputs = runner(*args, **kwargs)
            self._times.append((_synchronized_time() - start) * 1e3)
            return outputs

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the model's own ``generate``, with any strategy (beams too).

        Ranks that share layers must bring equal prompts.

        Raises:
            CallOrderError: The model has no ``generate``.
            DeepSpeedConfigError: The prompt is not ``[batch, tokens]`` of integers, is empty, or has an id outside the
                vocabulary.
            RuntimeError: A prompt is longer than the ``max_out_tokens`` of the configuration.
        """
        if not hasattr(self.module, "generate"):
            raise CallOrderError(
                f"InferenceEngine.generate: {type(self.module).__name__} has no generate method; call the engine "
                "itself, or give it a model of Transformers that generates"
            )
        prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if "inputs_embeds" not in kwargs:
            self._check_prompt(prompt)
        is_text = main_input_of(self.module, "input_ids") == "input_ids"
        if (
            self._longest is not None
            and is_text
            and isinstance(prompt, torch.Tensor)
            and prompt.shape[-1] > self._longest
        ):
            raise RuntimeError(
                f"generate: the prompt has {prompt.shape[-1]} tokens, max_out_tokens is {self._longest}; give "
                "init_inference a larger max_out_tokens, or shorten the prompt"
            )
        if self._runner[0] is not self.module and takes_synced_gpus(self.module.generate):
            # Ranks gather weights together, so a rank that is done continues until all are done.
            kwargs.setdefault("synced_gpus", True)
        if self._config.enable_cuda_graph and get_accelerator().device_name() != "cpu":
            kwargs.setdefault("cache_implementation", "static")
        with torch.no_grad(), self._timed_forwards():
            return self.module.generate(*args, **with_cache(kwargs))  # type: ignore[operator]

    @contextmanager
    def _timed_forwards(self) -> Iterator[None]:
        """Times the forwards of the model that run inside the context, if times are taken."""
        times = self._times
        if times is None:
            yield
            return
        started: list[float] = []
        hooks = (
            self.module.register_forward_pre_hook(lambda *_: started.append(_synchronized_time())),
            self.module.register_forward_hook(lambda *_: times.append((_synchronized_time() - started.pop()) * 1e3)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check_prompt(self, prompt: Any) -> None:
        """Raises for ids outside the vocabulary, which would make a CUDA context unusable."""
        if prompt is None or main_input_of(self.module, "input_ids") != "input_ids":
            return
        call = "generate(input_ids=...)"
        if not isinstance(prompt, torch.Tensor) or prompt.dim() != 2 or prompt.is_floating_point():
            is_tensor = isinstance(prompt, torch.Tensor)
            found = f"{prompt.dtype} of shape {tuple(prompt.shape)}" if is_tensor else f"{prompt!r:.80}"
            raise DeepSpeedConfigError(
                f"{call}: expected a tensor [batch, tokens] of integers, found {found}; a tokenizer gives it with "
                "return_tensors='pt'"
            )
        if prompt.numel() == 0:
            raise DeepSpeedConfigError(
                f"{call}: expected at least one token in each prompt, found none (shape {tuple(prompt.shape)}); begin "
                "each with a token, such as the model's bos_token_id"
            )
        known = getattr(getattr(self.module, "config", None), "vocab_size", None)
        least, most = int(prompt.min()), int(prompt.max())
        if isinstance(known, int) and (least < 0 or most >= known):
            raise DeepSpeedConfigError(
                f"{call}: found the id {least if least < 0 else most}; the vocabulary has 0 to {known - 1}. "
                "Use the tokenizer of this model"
            )

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None) -> None:
        """Compiles the model's forward with ``torch.compile``; compiles at the next call."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Times every forward from now on, in :meth:`generate` too, for :meth:`model_times`, by the host's clock."""
        self._times = []

    def model_times(self) -> list[float]:
        """Returns the time of every forward since the last call, in milliseconds.

        Raises:
            CallOrderError: :meth:`profile_model_time` was not called.
        """
        if self._times is None:
            raise CallOrderError("InferenceEngine.model_times: call profile_model_time() first")
        times, self._times = self._times, []
        return times

    def destroy(self) -> None:
        """Releases the model; the engine cannot be used afterwards. May be called twice."""
        if not self._runner:
            return
        runner = self._runner[0]
        if runner is not self.module:
            runner.destroy()  # type: ignore[operator]
        self._runner = ()
        del self.module


def _synchronized_time() -> float:
    """Waits for the device and returns the host's clock, in seconds."""
    get_accelerator().synchronize()
    return time.perf_counter()
