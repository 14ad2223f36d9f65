"""Language modelling: a small GPT in plain torch that learns to predict the next token. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.language_model import LanguageModelOperator

    config = {"train_data": token_ids, "validation_data": other_token_ids, "vocabulary": 50257, "width": 256}
    with TorchTrainer(training_operator_cls=LanguageModelOperator, num_workers=2, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_perplexity"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

from raysgd.operators.recipe import Recipe

__all__ = ["GPT", "LanguageModelOperator", "TokenBlocks", "markov_tokens"]

Pair = tuple[torch.Tensor, torch.Tensor]


class LanguageModelOperator(Recipe):
    """Learns next-token prediction from batches `(tokens, the same tokens shifted by one)`. One sample is a block of tokens.

    Training reports `train_loss` (nats per token). Validation reports `val_loss`, `val_perplexity` and `val_tokens`, over
    all tokens of all workers.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `train_data`, `validation_data`: token ids as one flat tensor, or a dataset of such pairs, or a function that
      creates either on the worker (default: random tokens with a perplexity of 4)
    - `model`: a function without arguments that returns the module (default: `GPT`, sized by `vocabulary` (64),
      `block_size` (32), `width` (64), `heads` (4) and `layers` (2))
    - `optimizer`: called with the parameters and `lr=` (default: AdamW)
    - `lr` (0.003), `batch_size` per worker (16; a global `BATCH_SIZE` overrides it)
    """

    default_batch_size = 16
    default_lr = 3e-3

    def setup(self, config: Mapping[str, Any]) -> None:
        model = self.make_model(config)
        optimizer = self.make_optimizer(model, config)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.register_data(**self.make_loaders(config, *self.make_data(config)))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        tokens = markov_tokens(vocabulary=config.get("vocabulary", 64))
        return tokens[: -len(tokens) // 5], tokens[-len(tokens) // 5 :]

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        block_size = config.get("block_size", 32)
        train_data, validation_data = (as_blocks(each, block_size) for each in super().make_data(config))
        return train_data, validation_data

    def make_model(self, config: Mapping[str, Any]) -> nn.Module:
        if "model" in config:
            model: nn.Module = config["model"]()
            return model
        return GPT(
            vocabulary=config.get("vocabulary", 64),
            block_size=config.get("block_size", 32),
            width=config.get("width", 64),
            heads=config.get("heads", 4),
            layers=config.get("layers", 2),
        )

    def train_batch(self, batch: Pair, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        tokens, following = batch
        with self.autocast():
            loss = next_token_loss(self.model(tokens), following)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": tokens.size(0)}

    @torch.no_grad()
    def validate(self, val_iterator: Iterable[Pair], info: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over the data. Perplexity is the exponential of the mean loss, not a mean of
        exponentials, so this sums the losses of all workers before it computes the exponential."""
        self.model.eval()
        sums = self.to_device(torch.zeros(2, dtype=torch.float64))  # loss, tokens
        batches = samples = 0
        for tokens, following in val_iterator:
            with self.autocast():
                loss = next_token_loss(self.model(tokens), following)
            sums[0] += loss * following.numel()
            sums[1] += following.numel()
            batches, samples = batches + 1, samples + tokens.size(0)
        if self.world_size > 1:
            torch.distributed.all_reduce(sums)
        mean = sums[0] / sums[1]
        return {
            "batch_count": batches,
            "num_samples": samples,
            "val_loss": mean,
            "val_perplexity": mean.exp(),
            "val_tokens": sums[1],
        }


class GPT(nn.Module):
    """A decoder-only transformer with normalisation before each part. The output layer shares the embedding's weights."""

    def __init__(self, *, vocabulary: int, block_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={width} and heads={heads}: change one of them"
            )
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)  # the first predictions are nearly uniform
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        place = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.norm(self.blocks(self.token(tokens) + self.position(place)))
        return nn.functional.linear(hidden, self.token.weight)


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # (batch, time, width) -> three times (batch, heads, time, width / heads)
        joint = self.query_key_value(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attended(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = hidden + self.feed(self.feed_norm(hidden))
        return result


class TokenBlocks(Dataset[Pair]):
    """Divides a flat tensor of token ids into pairs: `block_size` tokens, and the same tokens shifted by one."""

    def __init__(self, tokens: torch.Tensor, block_size: int) -> None:
        if len(tokens) <= block_size:
            raise ValueError(
                f"{len(tokens)} tokens are too few for one block of {block_size} and the token after it: pass more tokens, or a "
                'smaller config["block_size"]'
            )
        self.tokens, self.block_size = tokens.long(), block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no block {index}: there are {len(self)}")
        start = index * self.block_size
        block = self.tokens[start : start + self.block_size + 1]
        return block[:-1], block[1:]


def as_blocks(data: Any, block_size: int) -> Any:
    """The user's data as a dataset of pairs, or None."""
    return TokenBlocks(data, block_size) if isinstance(data, torch.Tensor) else data


def next_token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss in nats per token."""
    return cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def markov_tokens(length: int = 20_000, *, vocabulary: int = 64, successors: int = 4) -> torch.Tensor:
    """Generate tokens, each followed by one of a few others with equal probability. The best perplexity is
    `successors`."""
    generator = torch.Generator().manual_seed(0)
    followers = [torch.randperm(vocabulary, generator=generator)[:successors].tolist() for _ in range(vocabulary)]
    token, tokens = 0, []
    for choice in torch.randint(successors, (length,), generator=generator).tolist():
        token = followers[token][choice]
        tokens.append(token)
    return torch.tensor(tokens)
