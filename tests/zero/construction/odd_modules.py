"""Modules whose construction is odd, as real code has them."""

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.c_proj(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)


class InitializesAtTheEnd(nn.Module):
    """As many training scripts do: a pass over all modules, another over all parameters, then some by hand."""

    def __init__(self, width: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.zeros(9, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._initialize)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        with torch.no_grad():
            self.blocks[0].qkv.bias.add_(1.0)
            self.blocks[1].qkv.bias.copy_(self.blocks[0].qkv.bias * 2)
            self.positions.copy_(torch.arange(9.0)[:, None].expand(9, width))
            flat = self.blocks[1].c_proj.bias.view(-1)
            self.blocks[0].c_proj.bias.fill_(3)
            flat.fill_(4)  # through a view, after another parameter was used
            self.blocks[0].qkv.weight.data.mul_(0.5)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[-1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class ReturnsEarly(nn.Linear):
    def __init__(self, size: int, plain: bool = True) -> None:
        super().__init__(size, size)
        if plain:
            return
        self.extra = nn.Parameter(torch.ones(size))


class AddsLater(nn.Module):
    """Parameters arrive after ``__init__``, from outside and on the first use."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def grow(self):
        self.register_parameter("late", nn.Parameter(torch.full((self.size,), 2.0)))
        self.inner = nn.Linear(self.size, self.size)
        return self


class NoSuperSubclassHook(nn.Module):
    """Keeps its subclasses from being seen when they are defined."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.registered = True


@dataclasses.dataclass(eq=False)
class Described(nn.Module):
    """The dataclass decorator replaces ``__init__`` after the class was made."""

    size: int

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((self.size,), 5.0))


def decorated(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        self.after = nn.Parameter(torch.ones(3))

    return call


class DecoratedInit(nn.Module):
    @decorated
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(4, 2))


class FailsHalfway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        raise LookupError("half built")


class Mixed(nn.Module):
    """Kinds of parameters: half, integer, frozen, scalar, empty, one that appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(10.0) / 7)
        self.count = nn.Parameter(torch.arange(5), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.again = self.weight
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("ids", torch.arange(4))


class Normalized(nn.Module):
    """Twenty times the size of one of its blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def dynamic(size: int) -> nn.Module:
    """A class made at run time, without a name in any module."""

    def __init__(self: nn.Module) -> None:  # noqa: N807
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(size))

    return type("Dynamic", (nn.Module,), {"__init__": __init__})()


class ScalesOneByOne(nn.Module):
    """A last pass over all weights, which notes how many of them are full at a time."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.full_at_once = 0
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(0.5)
                full = sum(type(other.weight) is nn.Parameter for other in self.blocks)
                self.full_at_once = max(self.full_at_once, full)
