"""``torch.autocast`` for tensors without values.

Torch casts the arguments of an operation by their kind of device, and has no rules for ``meta``. Which operations
cast on the simulated device is read from torch; how (to the lower precision, to fp32, or to the widest type of the
arguments) is listed here, after torch's documentation of ``torch.amp``. Whether casting is on is torch's
own state, that of the CPU's autocast, so recomputation turns it on as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed.nested import map_tensors, tensors_of

_KEY = "AutocastPrivateUse1"  # a dispatch key that torch itself does not use
_SWITCH = "cpu"

_LOWER = frozenset(
    "_addmm_activation _convolution _native_multi_head_attention _scaled_dot_product_flash_attention "
    "_thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d "
    "conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot "
    "linalg_vecdot linear lstm_cell matmul mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell "
    "scaled_dot_product_attention".split()
)
_WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put scatter_add stack tensordot "
    "vdot".split()
)
_FP32_RESULT = frozenset(
    "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum".split()
)  # on devices other than the CPU: the sum is in fp32, the argument is not cast


class SimulatedAutocast:
    """Casts as a device of one kind does (``"cpu"``, or one like CUDA), while it is active as a context."""

    def __init__(self, kind: str) -> None:
        self._torch_key = "AutocastCPU" if kind == "cpu" else "AutocastCUDA"
        self._is_cpu = kind == "cpu"
        self._made_casts: list[torch.Tensor] | None = None  # casts of parameters, inside ``region``
        self._seen = WeakIdKeyDictionary()  # parameter to its latest cast, while that is alive

    @property
    def default_dtype(self) -> torch.dtype:
        """Torch's own choice for such a device."""
        return torch.get_autocast_dtype("cpu" if self._is_cpu else "cuda")

    @contextmanager
    def region(self, dtype: torch.dtype) -> Iterator[None]:
        """Replaces ``torch.autocast`` on meta; casts of parameters are cached until its end."""
        self._made_casts = []
        try:
            with torch.autocast(_SWITCH, dtype=dtype):
                yield
        finally:
            self._made_casts = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes operations on ``meta`` cast wherever autocast is on."""
        library = torch.library.Library("aten", "IMPL")
        others = torch.library.Library("_", "IMPL")
        key = torch._C.DispatchKey.__members__[_KEY]
        keys = torch._C.DispatchKeySet(key)
        was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        try:
            others.fallback(torch.library.fallthrough_kernel, _KEY)
            for name in torch._C._dispatch_get_all_op_names():
                casts = torch._C._dispatch_has_kernel_for_dispatch_key(name, self._torch_key)
                if casts and name.startswith("aten::"):
                    packet, _, overload = name.removeprefix("aten::").partition(".")
                    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    library.impl(name.removeprefix("aten::"), self._casting(operation, packet, keys), _KEY)
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
            with torch._C._IncludeDispatchKeyGuard(key):
                yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)
            library._destroy()
            others._destroy()
            self._seen.clear()

    def _casting(self, operation: Any, packet: str, keys: Any) -> Callable[..., Any]:
        names = [argument.name for argument in operation._schema.arguments]
        has_fp32_result = packet in _FP32_RESULT and "dtype" in names and not self._is_cpu

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                if not torch.is_autocast_enabled(_SWITCH):
                    return operation(*args, **kwargs)
                lower = torch.get_autocast_dtype(_SWITCH)
                if has_fp32_result:
                    given = dict(zip(names, args, strict=False)) | kwargs
                    if _can_cast(args[0]) and given.get("dtype") is None:
                        given["dtype"] = torch.float32
                    return operation(**given)
                if packet in _LOWER:
                    dtype = lower
                elif packet in _WIDEST:
                    is_wide = any(_can_cast(t) and t.dtype == torch.float32 for t in tensors_of((args, kwargs)))
                    dtype = torch.float32 if is_wide else lower
                else:
                    dtype = torch.float32
                args, kwargs = map_tensors((args, kwargs), partial(self._cast, dtype=dtype), _can_cast)
                return operation(*args, **kwargs)

        return run

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype:
            return tensor
        is_weight = tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32 and not tensor._is_view()
        if not is_weight:
            return tensor.to(dtype)
        known = self._seen.get(tensor)
        made = known() if known is not None else None
        if made is None or made.dtype != dtype:
            made = tensor.to(dtype)
            self._seen[tensor] = ref(made)
            if self._made_casts is not None:
                self._made_casts.append(made)
        return made


def _can_cast(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point() and value.dtype != torch.float64
    )


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Redirects ``torch.autocast`` for ``meta``, and queries about it, to a simulation's switch inside the context.

    Code that switches casting off for the device of its tensors (gates of experts, cut layers) names it so.
    """
    region, is_enabled, get_dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    class Autocast(region):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(_SWITCH if device_type == "meta" else device_type, *args, **kwargs)

    def enabled(*device: str) -> bool:
        return is_enabled(*(_SWITCH if name == "meta" else name for name in device))

    def dtype_of(device: str) -> torch.dtype:
        return get_dtype(_SWITCH if device == "meta" else device)

    torch.autocast = Autocast  # type: ignore[misc]
    torch.is_autocast_enabled, torch.get_autocast_dtype = enabled, dtype_of  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast = region  # type: ignore[misc]
        torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, get_dtype
