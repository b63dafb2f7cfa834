"""The model that trains on lab networks is a small character-level transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """A shape is the size of a model.

    Attributes:
        symbols: the size of the vocabulary.
        context: characters that it sees at once.
        width: the width of the residual stream.
        layers: blocks of attention and feed-forward.
        heads: the number of heads of each attention, which divides the width.
    """

    symbols: int
    context: int
    width: int
    layers: int
    heads: int


class CharacterModel(nn.Module):
    """This model predicts the next character; a call gives the mean cross-entropy in nats."""

    def __init__(self, shape: Shape) -> None:
        """Make it; the weights come from torch's global random generator."""
        super().__init__()
        self.symbol = nn.Embedding(shape.symbols, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)

    def forward(self, characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.blocks(self.symbol(characters) + self.place(places))
        logits = functional.linear(self.norm(hidden), self.symbol.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before = nn.LayerNorm(shape.width)
        self.question = nn.Linear(shape.width, 3 * shape.width)
        self.answer = nn.Linear(shape.width, shape.width)
        self.feed = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.question(self.before(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.answer(seen.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed(hidden)  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
