"""Pickling between the test process and the workers.

Tensors travel as bytes: torch's own way hands over shared-memory descriptors, which outlive neither a killed worker
nor a small /dev/shm. A view carries its own elements only, and a tensor from a device arrives on the CPU.
"""

import io
import pickle
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # Subclasses (Parameter among them) reduce to a plain tensor and arrive here in the second round.
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return _rebuild, (flat.view(torch.uint8).numpy().tobytes(), flat.dtype, tuple(obj.shape), obj.requires_grad)


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.requires_grad_(requires_grad)
