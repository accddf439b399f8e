"""Linear layers whose weight is cut over the ranks.

*Column-parallel*: each rank has some of the output features. The input is the same on all ranks, so its gradient is
summed. *Row-parallel*: each rank has some of the input features, and the output is the sum; the bias is added once,
after it.

Where the configuration cuts a model, an existing layer is changed in place (``parallel.tensor.making``): it
keeps its identity, name, parameters and hooks, and is still an instance of ``nn.Linear``. Programs that cut
layers themselves call the constructors.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from deepspeed.axes import TENSOR
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import copy_to, gather_from, scatter_to
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.tensor.regions import SharedInput, SplitParts, enter_shared
from deepspeed.parallel.tensor.split import Split
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.address import address_of

_AS_IT_IS = nullcontext()


class Sequence(Protocol):
    """Interface to a sequence that tensor-parallel ranks share; implemented by ``sequence.CutSequence``."""

    is_cut: bool

    def leave(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, then returns this rank's positions: ``[batch, S / ranks, width]``."""


class ProductBackend(Protocol):
    """Interface of the three products of a cut layer, computed in another precision (``fast_path.float8``).

    All operands are 2-D: values ``[rows, in]``, weights ``[out, in]``, gradients ``[rows, out]``. ``scales`` carries
    what the first one has found to the others.
    """

    def output(self, values: torch.Tensor, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``values @ weight.T``."""

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``gradient @ weight``."""

    def of_weight(self, gradient: torch.Tensor, values: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``gradient.T @ values``."""


class _ProductFunction(torch.autograd.Function):
    """A linear layer without a bias, by :class:`ProductBackend`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, products: ProductBackend) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.products, ctx.scales = products, {}
        out = products.output(values.reshape(-1, values.shape[-1]), weight, ctx.scales)
        return out.view(*values.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        of_input, of_weight = _gradients(ctx, gradient, values, weight)
        return (None if of_input is None else of_input.view(values.shape)), of_weight, None


def _gradients(
    ctx: Any, gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of input (2-D) and weight by :class:`ProductBackend`, if they are needed."""
    flat = gradient.reshape(-1, gradient.shape[-1])
    of_input = ctx.products.of_input(flat, weight, ctx.scales) if ctx.needs_input_grad[0] else None
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = ctx.products.of_weight(flat, values.reshape(-1, values.shape[-1]), ctx.scales)
    return of_input, of_weight


@dataclass
class CutLinear:
    """The cut of a linear layer."""

    channel: Channel  # the ranks
    shared_inputs: SharedInputs  # shares one input between column-parallel layers
    split: Split  # how the output features (column) or the input features (row) are split
    name: str  # the name of the layer, for messages
    is_transposed: bool = False  # the weight is (in, out), as in Transformers' ``Conv1D``
    # a column-parallel layer gives all output features; a row-parallel one takes all input features
    is_gathered: bool = False
    # the ranks that have the same part, whose gradients are summed; None: this rank alone has it
    replicas: Channel | None = None
    # gathers and sums activations that are cut along the sequence outside the layer's region; None: not cut
    sequence: Sequence | None = None
    products: ProductBackend | None = None  # computes the products; None: in their dtype

    @property
    def parts(self) -> SplitParts:
        """The ranks' parts of the output of a column-parallel layer, of the input of a row-parallel one."""
        return SplitParts(self.split)


class _Column(torch.autograd.Function):
    """A linear layer that sums the gradient of its input over ranks while computing that of its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shared: SharedInput | None,
        is_transposed: bool,
        products: ProductBackend | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.shared, ctx.is_transposed, ctx.products, ctx.scales = shared, is_transposed, products, {}
        if shared is not None:
            shared.users += 1
        if products is not None:
            product = products.output(values.reshape(-1, values.shape[-1]), weight, ctx.scales)
            out = product.view(*values.shape[:-1], product.shape[-1])
            return out if bias is None else out.add_(bias)
        return F.linear(values, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = pending = None
        if ctx.products is not None:
            if ctx.needs_input_grad[0]:
                product = ctx.products.of_input(flat, weight, ctx.scales)
                if ctx.shared is None:
                    of_input = product
                else:
                    pending = ctx.shared.add_product(product)
            if ctx.needs_input_grad[1]:
                of_weight = ctx.products.of_weight(flat, values.reshape(-1, values.shape[-1]), ctx.scales)
        elif ctx.needs_input_grad[0]:
            rows = weight.t() if ctx.is_transposed else weight
            if ctx.shared is None:
                of_input = flat @ rows
            else:
                pending = ctx.shared.add(flat, rows)
        if ctx.needs_input_grad[1] and ctx.products is None:
            inputs = values.reshape(-1, values.shape[-1])
            of_weight = inputs.t() @ flat if ctx.is_transposed else flat.t() @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        if pending is not None:
            of_input = pending.wait()
        return (None if of_input is None else of_input.view(values.shape)), of_weight, of_bias, None, None, None


class _Row(torch.autograd.Function):
    """A linear layer whose output is summed."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cut: CutLinear,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.is_transposed, ctx.products, ctx.scales = cut.is_transposed, cut.products, {}
        rows = weight if cut.is_transposed else weight.t()
        flat = values.reshape(-1, values.shape[-1])
        product = cut.channel.place((*values.shape[:-1], rows.shape[1]), flat)
        out = product.view(flat.shape[0], rows.shape[1])
        if cut.products is not None:
            out.copy_(cut.products.output(flat, weight, ctx.scales))
            if bias is not None and cut.channel.rank == 0:
                out += bias
        elif bias is not None and cut.channel.rank == 0:  # added on one rank only
            torch.addmm(bias, flat, rows, out=out)
        else:
            torch.mm(flat, rows, out=out)
        return cut.channel.start_sum(product, f"the output of {cut.name}").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.products is not None:
            of_input, of_weight = _gradients(ctx, gradient, values, weight)
            of_input = None if of_input is None else of_input.view(values.shape)
        elif ctx.needs_input_grad[0]:
            of_input = (flat @ (weight.t() if ctx.is_transposed else weight)).view(values.shape)
        if ctx.needs_input_grad[1] and ctx.products is None:
            inputs = values.reshape(-1, values.shape[-1])
            of_weight = inputs.t() @ flat if ctx.is_transposed else flat.t() @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        return of_input, of_weight, of_bias, None


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """Returns the dtype that ``torch.autocast`` gives a linear layer; None: autocast is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _as(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


@uncompiled
def column(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: CutLinear) -> torch.Tensor:
    """Computes a column-parallel layer. All ranks of ``cut.channel`` must call it.

    Args:
        values: ``[..., in]``.
        weight: ``[out of this rank, in]``, or its transpose where ``cut.is_transposed``.
        bias: ``[out of this rank]`` or None.

    Returns:
        ``[..., out of this rank]``, or ``[..., out]`` where ``cut.is_gathered``.
    """
    kind = values.device.type
    if cut.replicas is not None:
        weight = copy_to(weight, cut.replicas, f"the gradient of the weight of {cut.name}")
        if bias is not None:
            bias = copy_to(bias, cut.replicas, f"the gradient of the bias of {cut.name}")
    dtype = _autocast_dtype(kind)
    if dtype is not None:
        weight, bias = _as(dtype, weight, bias)  # type: ignore[assignment]
    if cut.sequence is not None and cut.sequence.is_cut:  # the gather before the region sums the gradient
        entered, shared = values if dtype is None else values.to(dtype), None
    else:
        entered, shared = cut.shared_inputs.enter(values, dtype, cut.name)
    with torch.autocast(kind, enabled=False) if dtype is not None else _AS_IT_IS:
        out = _Column.apply(entered, weight, bias, shared, cut.is_transposed, cut.products)
    return gather_from(out, cut.channel, cut.parts, label=f"the output of {cut.name}") if cut.is_gathered else out


@uncompiled
def _row(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: CutLinear) -> torch.Tensor:
    kind = values.device.type
    if cut.is_gathered:
        values = scatter_to(values, cut.channel, cut.parts, f"the gradient of the input of {cut.name}")
    if cut.sequence is not None and cut.sequence.is_cut:
        if cut.products is not None:
            product = cut.sequence.leave(_ProductFunction.apply(values, weight, cut.products))
        else:
            product = cut.sequence.leave(F.linear(values, weight.t() if cut.is_transposed else weight))
        if bias is None:
            return product
        # The bias keeps its dtype for the sum of its gradient; autocast gives the product another one.
        return product + copy_to(bias, cut.channel, f"the gradient of the bias of {cut.name}").to(product.dtype)
    dtype = _autocast_dtype(kind)
    if dtype is None:
        return _Row.apply(values, weight, bias, cut)
    values, weight, bias = _as(dtype, values, weight, bias)  # type: ignore[assignment]
    with torch.autocast(kind, enabled=False):
        return _Row.apply(values, weight, bias, cut)


def take_part(
    parameter: nn.Parameter, dim: int, place: int, size: int, name: str, *, is_part: bool = False, blocks: int = 1
) -> nn.Parameter:
    """Reduces a parameter to this rank's even part, and marks it as Megatron-LM does. Communicates nothing.

    It is whole, with equal values on all ranks of the layer, and is cut along ``dim``, which packs ``blocks`` equal
    tensors that are cut separately; with ``is_part`` it has this rank's part already. Returns ``parameter``.

    Raises:
        DeepSpeedConfigError: It is sharded by ``zero.Init``, or has fewer indices than there are ranks, or the ranks
            cannot share out packed tensors evenly.
    """
    if address_of(parameter) is not None:
        raise DeepSpeedConfigError(
            f"{name}: expected a layer with whole weights, found one that deepspeed.zero.Init has sharded. Build it "
            "outside of zero.Init, or let initialize cut the model with tensor_parallel.autotp_size"
        )
    extent = parameter.shape[dim]
    if not is_part:
        if extent < size:
            raise DeepSpeedConfigError(
                f"{name}: dimension {dim} of its weight has {extent} indices, fewer than the {size} ranks of mp_group. "
                "Give it a smaller group"
            )
        if blocks > 1 and extent % (blocks * size):
            raise DeepSpeedConfigError(
                f"{name}: dimension {dim} of its weight has {extent} indices, which {blocks} packed tensors cannot "
                f"share evenly over the {size} ranks of mp_group. Give the layer whole, or change the group"
            )
        intervals = Split.evenly(extent, size, parts=blocks).intervals(place)
        parameter.data = torch.cat([parameter.data.narrow(dim, low, high - low) for low, high in intervals], dim)
        parameter.grad = None
    if size > 1:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if is_part or extent % size == 0:  # the marks of uneven parts cannot state which part it is
            parameter.partition_dim, parameter.partition_stride = dim, blocks  # type: ignore[attr-defined]
    return parameter


class _MadeFromLinear(nn.Linear):
    """A cut layer that can also be constructed from a whole one."""

    tensor_cut: CutLinear  # how it is cut
    _dim: ClassVar[int]

    def __init__(
        self,
        module: nn.Linear,
        mp_group: Any = None,
        skip_partition: bool = False,
        *,
        name: str | None = None,
        is_gathered: bool = False,
        blocks: int = 1,
    ) -> None:
        nn.Module.__init__(self)
        label = type(self).__name__ if name is None else name
        if not isinstance(module, nn.Linear) or isinstance(module, (ColumnLinear, RowLinear)):
            raise TypeError(
                f"{label}(module): expected a torch.nn.Linear that is whole, found {type(module).__name__}. Give it "
                "the layer that the ranks of mp_group shall share"
            )
        device = module.weight.device
        channel = Channel(LocalTransport()) if mp_group is None else axis_of(mp_group, TENSOR).channel(device)
        whole = module.weight.shape[self._dim] * (channel.size if skip_partition else 1)
        for key, parameter in (("weight", module.weight), ("bias", module.bias)):
            if parameter is not None and (key == "weight" or self._dim == 0):
                place = (self._dim, channel.rank, channel.size, label)
                take_part(parameter, *place, is_part=skip_partition, blocks=blocks)  # type: ignore[arg-type]
            self.register_parameter(key, parameter)  # type: ignore[arg-type]
        self.out_features, self.in_features = self.weight.shape
        split = Split.evenly(whole, channel.size, parts=blocks)
        self.tensor_cut = CutLinear(channel, SharedInputs(channel), split, label, is_gathered=is_gathered)
        self.train(module.training)


class ColumnLinear(_MadeFromLinear):
    """A linear layer with some of the output features.

    All ranks of the group must make it, from layers with equal values. With a group of more than one rank, pass
    ``initialize(mpu=...)`` an mpu with the ranks that share layers.

    Args:
        module: The whole layer, ``[out, in]``. Its parameters become this layer's, and keep this rank's rows.
        mp_group: Torch process group of the ranks that share it; None: this rank has it alone.
        skip_partition: ``module`` has this rank's rows already, as many as on the other ranks.
        name: The name of the layer, for messages.
        is_gathered: Gives all output features.
        blocks: Number of equal tensors packed in the rows, such as gate and up; each is cut separately.

    Raises:
        TypeError: ``module`` is not a whole linear layer.
        DeepSpeedConfigError: It is sharded, or has fewer output features than there are ranks.
    """

    _dim = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out of this rank]``, or to ``[..., out]`` where the output is gathered."""
        return column(values, self.weight, self.bias, self.tensor_cut)

    def extra_repr(self) -> str:
        """Returns the sizes of the whole layer and of this rank's part."""
        return _shown(self, "column")


class RowLinear(_MadeFromLinear):
    """A linear layer with some of the input features, whose output is summed over the ranks.

    Arguments and errors are those of :class:`ColumnLinear`, with columns for rows and inputs for outputs:
    ``is_gathered`` takes all input features and uses this rank's. The bias stays whole and is added once.
    """

    _dim = 1

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in of this rank]``, or ``[..., in]`` where the input is whole, to ``[..., out]``."""
        return _row(values, self.weight, self.bias, self.tensor_cut)

    def extra_repr(self) -> str:
        """Returns the sizes of the whole layer and of this rank's part."""
        return _shown(self, "row")


def _shown(layer: nn.Linear, kind: str) -> str:
    cut: CutLinear = layer.tensor_cut  # type: ignore[assignment]
    features = f"in_features={layer.in_features}, out_features={layer.out_features}"
    return f"{features}, {kind}-parallel, rank {cut.channel.rank} of {cut.channel.size}"


def _blocks_of(layer: str, module: nn.Module, shape: Any, dim: int) -> int:
    """Returns how many equal tensors a weight packs along ``dim`` by a view such as ``(3, -1)``."""
    packed = shape[dim] if isinstance(shape, (tuple, list)) and dim < len(shape) else None
    if isinstance(packed, (tuple, list)) and len(set(packed)) == 1:
        packed = len(packed)
    extent = module.weight.shape[dim] if isinstance(module, nn.Linear) else None
    if not isinstance(packed, int) or packed < 1 or (extent is not None and extent % packed):
        raise DeepSpeedConfigError(
            f"{layer}(shape={shape!r}): expected the number of equal tensors that dimension {dim} of the weight packs, "
            f"as in (3, -1), one that divides {extent}. Where they have other sizes (grouped heads), let initialize "
            "cut the model: tensor_parallel.partition_config takes their sizes"
        )
    return packed


def _refuse_dim(layer: str, found: int, expected: int) -> None:
    if found != expected:
        raise DeepSpeedConfigError(
            f"{layer}(partition_dim={found}): expected {expected}, the dimension that this class cuts. Use "
            f"{'SubParamLinearAllreduce' if expected == 0 else 'SubParamLinearLayer'} to cut the other"
        )


class PackedColumnLinear(ColumnLinear):
    """A column-parallel layer with several equal tensors in its rows, such as query, key and value.

    Arguments and errors are those of :class:`ColumnLinear`. ``shape`` is a view of the weight whose first entry is the
    number of packed tensors, as in ``(3, -1)``; ``partition_dim`` is 0. The ranks must share out each tensor evenly.
    """

    def __init__(
        self, module: nn.Linear, mp_group: Any = None, shape: Any = None, partition_dim: int = 0, *, name: Any = None
    ) -> None:
        _refuse_dim("SubParamLinearLayer", partition_dim, 0)
        super().__init__(module, mp_group, name=name, blocks=_blocks_of("SubParamLinearLayer", module, shape, 0))


class GatedColumnLinear(ColumnLinear):
    """A column-parallel layer whose rows are gate and up projection, one after the other.

    Arguments and errors are those of :class:`ColumnLinear`; each half of the rows is cut.
    """

    def __init__(
        self, module: nn.Linear, mp_group: Any = None, skip_partition: bool = False, *, name: Any = None
    ) -> None:
        super().__init__(module, mp_group, skip_partition, name=name, blocks=2)


class PackedRowLinear(RowLinear):
    """A row-parallel layer with several equal tensors in its columns.

    Arguments and errors are those of :class:`PackedColumnLinear`, with columns for rows: the second entry of ``shape``
    counts, as in ``(-1, 2)``, and ``partition_dim`` is 1.
    """

    def __init__(
        self, module: nn.Linear, mp_group: Any = None, shape: Any = None, partition_dim: int = 1, *, name: Any = None
    ) -> None:
        _refuse_dim("SubParamLinearAllreduce", partition_dim, 1)
        super().__init__(module, mp_group, name=name, blocks=_blocks_of("SubParamLinearAllreduce", module, shape, 1))


class WholeInputRowLinear(RowLinear):
    """A row-parallel layer that takes all input features on each rank, for heads.

    Arguments and errors are those of :class:`RowLinear`.
    """

    def __init__(self, module: nn.Linear, mp_group: Any = None, *, name: Any = None) -> None:
        super().__init__(module, mp_group, name=name, is_gathered=True)


class ColumnConv1D(ColumnLinear):
    """:class:`ColumnLinear` with a weight of (in, out)."""


class RowConv1D(RowLinear):
    """:class:`RowLinear` with a weight of (in, out)."""


class SharedInputs:
    """Remembers the latest input, so that consecutive layers (query, key and value, or gate and up) share it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._latest: tuple[torch.Tensor, int, torch.dtype | None, torch.Tensor, SharedInput] | None = None

    def __deepcopy__(self, memo: Any) -> SharedInputs:
        return SharedInputs(self._channel)

    def enter(
        self, values: torch.Tensor, dtype: torch.dtype | None, name: str
    ) -> tuple[torch.Tensor, SharedInput | None]:
        """Returns a layer's input ``[..., in]``, and the object to which it adds the gradient of that input.

        It is cast to ``dtype``; None: its own. The object is None if the input needs no gradient.
        """
        if not (torch.is_grad_enabled() and values.requires_grad):
            self._latest = None
            return (values if dtype is None else values.to(dtype)), None
        if self._latest is not None:
            known, version, wanted, entered, shared = self._latest
            if known is values and version == values._version and wanted == dtype and shared.is_open:
                return entered, shared
        shared = SharedInput(self._channel, f"the gradient of the input of {name}", self._forget)
        entered = enter_shared(values if dtype is None else values.to(dtype), shared)
        self._latest = values, values._version, dtype, entered, shared
        return entered, shared

    def _forget(self, shared: SharedInput) -> None:
        """Drops the input once its backward has begun, so that the activation can be freed."""
        if self._latest is not None and self._latest[4] is shared:
            self._latest = None
