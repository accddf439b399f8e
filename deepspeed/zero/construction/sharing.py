"""The groups that share parameters before there is an engine: all ranks of the context, or a declared group."""

from __future__ import annotations

import weakref
from dataclasses import replace
from datetime import timedelta

import torch

from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.tiling.describe import CUT, describe
from deepspeed.zero.tiling.layout import DATA

_known: weakref.WeakKeyDictionary[Transport, dict[str, BucketGroup]] = weakref.WeakKeyDictionary()
"""Groups by the transport of all ranks of a context, so that successive contexts share them."""


class ProvisionalGroups:
    """The groups of one ``zero.Init`` context, made when a parameter first requests them."""

    def __init__(self, job: Job, peers: Transport, device: torch.device, timeout: timedelta | None) -> None:
        self._declared = job.declared
        self.peers = peers
        self._device = device
        self._timeout = timeout
        self._groups = _known.setdefault(peers, {DATA: BucketGroup.over(peers)})

    def of(self, name: str, parameter: torch.Tensor) -> BucketGroup:
        """Returns the group of a parameter. Every rank must call it, with the same one.

        Args:
            parameter: The parameter, of any shape; only its marks are read.

        Raises:
            DeepSpeedConfigError: It belongs to a group that is not declared.
        """
        wanted = describe(name, parameter).group
        wanted = DATA if wanted == CUT else wanted  # each model-parallel rank builds its own part
        defined = self._declared.defined().get(wanted)
        if wanted not in self._groups or (defined is not None and self._groups[wanted].ranks != defined.ranks):
            if defined is None:
                raise DeepSpeedConfigError(
                    f"zero.Init: {name!r} belongs to the group {wanted!r}, which is not defined; call "
                    f"deepspeed.comm.define_group({wanted!r}, ranks) on every rank before the model is built"
                )
            transport = self._declared.connect(
                defined,
                self.peers,
                "parameters before initialize",
                device=self._device,
                timeout=self._timeout,
                owner="job",
            )
            self._groups[wanted] = replace(BucketGroup.over(transport, name=wanted), ranks=defined.ranks)
        return self._groups[wanted]
