"""What both training scripts share: text, tokens, masks, the model and the arguments. Nothing here uses DeepSpeed.

The text is the library of the Python that runs it, so nothing is downloaded. A token is a word or a sign; the
vocabulary holds the most frequent ones. Of every sequence some tokens are hidden, and the model learns to predict them
from the rest.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

PAD, START, END, MASK, UNKNOWN = range(5)  # the first numbers of the vocabulary
NUM_SPECIAL = 5
NOT_PREDICTED = -100  # label of a token that the loss leaves out


class Corpus:
    """Source files cut into sequences of token numbers.

    Args:
        sequence_length: Tokens of a sequence, its start and end included.
        vocabulary_size: Kinds of tokens, the special ones included.
        max_bytes: How much text is read.
    """

    def __init__(self, sequence_length: int, vocabulary_size: int = 4096, max_bytes: int = 1_500_000) -> None:
        tokens = re.findall(r"\w+|[^\w\s]", _text(Path(sysconfig.get_path("stdlib")), max_bytes))
        kept = [token for token, _ in Counter(tokens).most_common(vocabulary_size - NUM_SPECIAL)]
        numbers = {token: number for number, token in enumerate(kept, NUM_SPECIAL)}
        self.vocabulary_size = NUM_SPECIAL + len(kept)
        stream = torch.tensor([numbers.get(token, UNKNOWN) for token in tokens])
        self.sequences = stream[: len(stream) // (sequence_length - 2) * (sequence_length - 2)]
        self.sequences = self.sequences.view(-1, sequence_length - 2)

    def batches(
        self, batch_size: int, mask_prob: float, start: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Batches without end; batch ``i`` of a rank is always the same, so a resumed run goes on where it stopped."""
        step = start
        while True:
            dice = torch.Generator().manual_seed(step * world_size + rank)
            chosen = torch.randint(len(self.sequences), (batch_size,), generator=dice)
            yield self._hide(self.sequences[chosen], mask_prob, dice)
            step += 1

    def _hide(self, tokens: torch.Tensor, mask_prob: float, dice: torch.Generator) -> dict[str, torch.Tensor]:
        """Asks for some tokens: most of them become a mask, some any token, some stay (arXiv:1810.04805)."""
        edges = torch.full((len(tokens), 1), START), torch.full((len(tokens), 1), END)
        requested = torch.rand(tokens.shape, generator=dice) < mask_prob
        requested[:, 0] |= ~requested.any(dim=1)  # a loss over nothing is not a number
        labels = torch.where(requested, tokens, NOT_PREDICTED)
        how = torch.rand(tokens.shape, generator=dice)
        anything = torch.randint(NUM_SPECIAL, self.vocabulary_size, tokens.shape, generator=dice)
        seen = torch.where(requested & (how < 0.8), MASK, tokens)
        seen = torch.where(requested & (how > 0.9), anything, seen)
        not_predicted = torch.full((len(tokens), 1), NOT_PREDICTED)
        return {
            "input_ids": torch.cat((edges[0], seen, edges[1]), dim=1),
            "labels": torch.cat((not_predicted, labels, not_predicted), dim=1),
        }


def _text(folder: Path, max_bytes: int) -> str:
    texts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
        if size > max_bytes:
            break
    return "\n".join(texts)[:max_bytes]


def create_model(args: argparse.Namespace, vocabulary_size: int) -> BertForMaskedLM:
    """A BERT with random weights, the same in every run."""
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=args.h_dim,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            intermediate_size=args.ff_dim,
            hidden_dropout_prob=args.dropout,
            attention_probs_dropout_prob=args.dropout,
            max_position_embeddings=args.max_seq_length,
            pad_token_id=PAD,
        )
    )


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint_dir", type=Path, help="folder to save to; without one nothing is saved")
    parser.add_argument("--load_checkpoint_dir", type=Path, help="folder of checkpoints to resume from")
    parser.add_argument("--num_iterations", type=int, default=10_000, help="steps")
    parser.add_argument("--checkpoint_every", type=int, default=1000, help="steps")
    parser.add_argument("--log_every", type=int, default=10, help="steps")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences of a step, on each rank")
    parser.add_argument("--max_seq_length", type=int, default=512, help="tokens")
    parser.add_argument("--mask_prob", type=float, default=0.15, help="share of the tokens that are masked")
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=8)
    parser.add_argument("--ff_dim", type=int, default=512)
    parser.add_argument("--h_dim", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--local_rank", type=int, default=-1, help="device of this process; -1 is the CPU without GPUs")
    return parser.parse_args()


class Log:
    """Prints the mean loss of the last steps."""

    def __init__(self, every: int, is_first: bool = True) -> None:
        self.every, self.is_first = every, is_first
        self.losses: list[float] = []

    def __call__(self, step: int, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        if (step + 1) % self.every == 0:
            if self.is_first:
                print(f"step {step + 1:6d}  loss {sum(self.losses) / len(self.losses):.4f}", flush=True)
            self.losses.clear()
