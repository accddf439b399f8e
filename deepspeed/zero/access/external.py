"""Parameters that a module uses without owning them.

Registration is not needed: a use outside the owning module is detected when it happens, and the parameter's bucket is
gathered. The functions exist because programs call them; registered parameters can be listed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.errors import DeepSpeedConfigError

_REGISTERED = "_ds_external_parameters"


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Records that the forward of ``module`` uses ``parameter``, which another module owns.

    It is accepted and listed by ``module.ds_external_parameters()``; the use would be found without it.

    Raises:
        DeepSpeedConfigError: ``parameter`` is not a ``torch.nn.Parameter``.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise DeepSpeedConfigError(
            f"register_external_parameter(module, parameter): expected a torch.nn.Parameter, found "
            f"{type(parameter).__name__}"
        )
    found = module.__dict__.setdefault(_REGISTERED, [])
    if all(known is not parameter for known in found):
        found.append(parameter)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undoes :func:`register_external_parameter`.

    Raises:
        DeepSpeedConfigError: It was not registered.
    """
    found = module.__dict__.get(_REGISTERED, [])
    kept = [known for known in found if known is not parameter]
    if len(kept) == len(found):
        raise DeepSpeedConfigError(
            "unregister_external_parameter(module, parameter): it was not registered with this module; "
            "call it with the module that registered it"
        )
    module.__dict__[_REGISTERED] = kept


def external_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the registered parameters of one module as ``(key, parameter)``."""
    for position, parameter in enumerate(module.__dict__.get(_REGISTERED, [])):
        yield str(position), parameter
