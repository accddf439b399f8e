"""``compile``: DeepCompile."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int

_CALL = "call engine.compile(backend=..., compile_kwargs=...)"


class Compile(Section):
    """DeepCompile: compiler passes that schedule ZeRO's communication.

    ``engine.compile()`` does not need this section.
    """

    switch_name = "deepcompile"

    deepcompile: Bool = key(False, "Use the passes.", since="0.16.6")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None, "Names of passes; autotp only alone.", null_means="chosen by the stage"
    )
    free_activation: Bool = key(False, "Free large activations.")
    free_activation_threshold: Int = key(
        10_485_760, "Size from which an activation counts as large.", unit="bytes", minimum=0
    )
    offload_activation: Bool = key(False, "Move activations to host memory.")
    offload_activation_pin_memory: Bool = key(True, "Page-locked host memory for them.")
    offload_opt_states: Bool = key(False, "Move optimizer state to host memory.")
    offload_parameters: Bool = key(False, "Move parameters to host memory.")
    double_buffer: Bool = key(True, "Use two buckets for reductions.")
    symmetric_memory: Bool = key(False, "Gather through symmetric memory.")
    debug_log: Bool = key(False, "Log the passes.")
    sync_before_reduce: Bool = key(False, "Debugging: synchronise before reductions.")
    sync_after_reduce: Bool = key(False, "Debugging: synchronise after reductions.")
    sync_before_allgather: Bool = key(False, "Debugging: synchronise before gathers.")
    sync_after_allgather: Bool = key(False, "Debugging: synchronise after gathers.")
    keep_int_input_tensors: Bool = key(True, "Keep integer inputs for the profile.")
    keep_all_input_tensors: Bool = key(False, "Keep all inputs for the profile.")
    autoep_non_moe: Bool = key(False, "Compile the model without its experts.", since="0.19.8")
    enabled: Bool = key(False, "From releases up to 0.14.3.", removed="0.14.4", no_effect=_CALL)
    backend: str | None = key(None, "From releases up to 0.14.3.", removed="0.14.4", no_effect=_CALL)
    kwargs: dict[str, Any] | None = key(None, "From releases up to 0.14.3.", removed="0.14.4", no_effect=_CALL)
    disable: Bool = key(False, "From releases up to 0.14.3.", removed="0.14.4", no_effect=_CALL)
