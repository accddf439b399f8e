"""What to do about inputs in another dtype than the model computes in, which torch refuses without a way out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.gather.outputs import tensors_in

_ABOUT_DTYPES = re.compile(r"\bdtype|scalar type|input type|same type", re.IGNORECASE)


def explain_mismatch(
    error: RuntimeError, policy: PrecisionPolicy, inputs: Sequence[Any], named: Mapping[str, Any]
) -> str | None:
    """The sentence about a forward that failed because of its inputs' dtype; None if it failed for another reason.

    Args:
        error: What forward raised.
        policy: The engine's dtypes.
        inputs: Positional arguments of forward.
        named: Its other arguments.
    """
    dtype = policy.compute_dtype
    if dtype is None or isinstance(error, DeepSpeedError) or not _ABOUT_DTYPES.search(str(error)):
        return None
    found = [
        f"argument {name!r} in {other}"
        for name, value in (*enumerate(inputs), *named.items())
        for other in {t.dtype for t in tensors_in(value) if t.is_floating_point() and t.dtype != dtype}
    ]
    if not found:
        return None
    section = policy.name
    return (
        f"engine.forward: {section}.enabled makes the model compute in {dtype}, but it was given {', '.join(found)}, "
        f"which torch refuses ({str(error).splitlines()[0]}). Cast it (x.to({dtype})), let the engine cast every "
        f"floating input ({section}.auto_cast: true), or compute under torch.autocast (torch_autocast.enabled: true "
        f"instead of {section})"
    )
