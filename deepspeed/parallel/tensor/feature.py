"""Tensor parallelism as an engine feature: cuts layers over ranks, or accepts a model that is cut already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed.axes import TENSOR
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.parallel.optimizer_states import refuse_whole_states
from deepspeed.parallel.sequence.context import left_alone
from deepspeed.parallel.tensor.cutting import CUT, CutModel, cut_model, is_cut
from deepspeed.parallel.tensor.dtensors import adopt_dtensors, is_dtensor
from deepspeed.parallel.tensor.marks import read_marks
from deepspeed.parallel.tensor.request import merged


class TensorParallelism(EngineFeature):
    """Layers whose weights are cut over ranks."""

    title = "tensor parallelism"
    setting = "tensor_parallel.autotp_size"

    @override
    def complete(self, root: Root, model: nn.Module, mpu: Any) -> Root:
        return merged(root, model, mpu)

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if is_cut(setup.model):
            return
        size = setup.root.tensor_parallel.autotp_size
        if any(map(is_dtensor, setup.model.parameters())):
            size = max(size, setup.ranks.mesh.size(TENSOR))
        refuse_whole_states(setup.optimizer, size, "tensor_parallel.autotp_size")

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        job, model, mesh, section = setup.job, setup.model, setup.ranks.mesh, setup.root.tensor_parallel
        if mesh.size(TENSOR) > 1 and section.autotp_size <= 1:
            read_marks(job, model, mesh, setup.device)
        exchanged = adopt_dtensors(job, model, mesh, setup.device)
        with left_alone(model):  # the consistency check runs on each rank by itself
            cut_model(job, model, section, mesh, setup.device)
        return exchanged

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        cut = getattr(setup.model, CUT, None)
        return cut.counts if isinstance(cut, CutModel) else {}


FEATURE = TensorParallelism()
