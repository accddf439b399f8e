"""A small language model with experts against the dense one that computes as much per token.

    deepspeed --num_gpus 2 train.py             two ranks share eight experts
    python train.py                             one rank has all

The text is made up: sixteen languages, each with a rule of its own for the next word, and the first word of a sentence
determines the language. Both models see the same sentences and multiply as many numbers per word; the one with experts
has eight times as many weights in its feed-forward layers to remember rules with. Writes losses.svg.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.parallel.expert.feature import save_loads_picture

WORDS, LANGUAGES, LENGTH = 64, 16, 24
WIDTH, INNER, LAYERS, HEADS = 64, 64, 2, 4
EXPERTS = 8
BALANCE = 0.01  # weight of the loss that keeps experts evenly busy


# --- the text --------------------------------------------------------------------------------------------------------

RULES = torch.stack([torch.randperm(WORDS, generator=torch.Generator().manual_seed(n)) for n in range(LANGUAGES)])


def sentences(count: int, draws: torch.Generator) -> torch.Tensor:
    """``[count, LENGTH + 1]``: a language's name, then words that follow its rule nine times in ten."""
    language = torch.randint(LANGUAGES, (count,), generator=draws)
    words = [torch.randint(WORDS, (count,), generator=draws)]
    for _ in range(LENGTH - 1):
        anything = torch.randint(WORDS, (count,), generator=draws)
        follows = torch.rand(count, generator=draws) < 0.9
        words.append(torch.where(follows, RULES[language, words[-1]], anything))
    return torch.stack([WORDS + language, *words], dim=1)


# --- the model -------------------------------------------------------------------------------------------------------


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Block(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # The one line in which the two models differ.
        self.rest = MoE(WIDTH, feed_forward(), EXPERTS, ep_size, capacity_factor=2.0) if ep_size else feed_forward()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        found = self.rest(self.between(x))
        if isinstance(self.rest, MoE):
            return x + found[0], found[1]
        return x + found, 0.0


class Model(nn.Module):
    """``ep_size`` 0 is the dense one."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS + LANGUAGES, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(ep_size) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of predicting each word, and the balance loss."""
        x = self.words(text[:, :-1]) + self.places.weight
        balance = x.new_zeros(())
        for block in self.blocks:
            x, l_aux = block(x)
            balance = balance + l_aux
        return F.cross_entropy(self.last(x).flatten(0, 1), text[:, 1:].flatten()), balance


# --- training --------------------------------------------------------------------------------------------------------


def train(ep_size: int, steps: int, samples: int, picture: Path | None) -> list[float]:
    """Losses, averaged over ten steps and all ranks."""
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    model = Model(ep_size)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    curve, recent = [], torch.zeros(())
    for step in range(1, steps + 1):
        loss, balance = engine(sentences(samples, draws).to(engine.device))
        engine.backward(loss + BALANCE * balance)
        engine.step()
        recent = recent + loss.detach().cpu() / 10
        if step % 10 == 0:
            dist.all_reduce(recent)
            curve.append(recent.item() / dist.get_world_size())
            recent = torch.zeros(())
    if ep_size and picture is not None and dist.get_rank() == 0:
        save_loads_picture(engine.module, picture.with_name("loads.svg"))
    engine.destroy()
    return curve


def draw(curves: dict[str, list[float]], floor: float) -> str:
    """Loss over steps as SVG."""
    width, height, left, bottom = 640, 360, 60, 40
    low, high = floor * 0.9, max(map(max, curves.values()))
    most = max(map(len, curves.values()))

    def place(index: int, loss: float) -> str:
        across = left + index / max(most - 1, 1) * (width - left - 20)
        return f"{across:.1f},{20 + (high - loss) / (high - low) * (height - bottom - 20):.1f}"

    parts = [f'<polyline points="{place(0, floor)} {place(most - 1, floor)}" stroke="#888" stroke-dasharray="5 4"/>']
    for number, ((name, curve), color) in enumerate(zip(curves.items(), ("#c8553d", "#1b6ca8"), strict=True)):
        points = " ".join(place(index, loss) for index, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 260}" y="{40 + 20 * number}" fill="{color}">{name}: {curve[-1]:.3f}</text>')
    parts.append(f'<text x="{width - 260}" y="80" fill="#888">who knows all rules: {floor:.3f}</text>')
    parts.append(f'<text x="{left}" y="{height - 12}">1 to {most * 10} steps; loss in nats per word</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return f'{head}<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sentences", type=int, default=64, help="per step, of all ranks together")
    parser.add_argument("--picture", type=Path, default=Path("losses.svg"))
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    deepspeed.init_distributed()
    ranks = dist.get_world_size()
    samples = options.sentences // ranks
    curves = {
        "dense": train(0, options.steps, samples, None),
        f"{EXPERTS} experts": train(math.gcd(EXPERTS, ranks), options.steps, samples, options.picture),
    }
    right = 0.9 + 0.1 / WORDS
    surprise = -right * math.log(right) - (1 - right) * math.log(0.1 / WORDS)
    floor = (math.log(WORDS) + (LENGTH - 1) * surprise) / LENGTH  # the first word follows no rule
    if dist.get_rank() == 0:
        options.picture.write_text(draw(curves, floor))
        for name, curve in curves.items():
            print(f"{name}: loss {curve[0]:.3f} at first, {curve[-1]:.3f} after {options.steps} steps")
        print(f"who knows all rules: {floor:.3f}; the curves are in {options.picture}")


if __name__ == "__main__":
    main()
