"""Contrastive learning of images and texts (CLIP), with the texts and images of all workers as negatives. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.contrastive import ContrastiveOperator

    config = {"model": "openai/clip-vit-base-patch32", "train_data": my_pairs, "validation_data": other_pairs, "lr": 1e-5}
    with TorchTrainer(training_operator_cls=ContrastiveOperator, num_workers=8, config=config) as trainer:
        trainer.train()
        print(trainer.validate()["val_text_recall_at_1"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize, pad
from torch.utils.data import Dataset

from raysgd.operators.recipe import Recipe

try:
    from transformers import CLIPConfig, CLIPModel
except ImportError as error:
    raise ImportError("raysgd.operators.contrastive needs transformers: pip install 'raysgd[operators]'") from error

__all__ = ["Captioned", "ContrastiveOperator"]


class ContrastiveOperator(Recipe):
    """Trains an image encoder and a text encoder so that an image is nearest to its own text, as in CLIP.

    The negatives of a sample are the other samples of the step on *all* workers. Gradients flow through the gathered
    embeddings to the workers that computed them, so a step of several workers equals that of one with all samples.

    Training reports `train_loss`. Validation compares each image with each text of the complete validation data, and reports
    `val_loss`, the share of images whose own text is the first, or among the five first (`val_text_recall_at_1`,
    `val_text_recall_at_5`), and the same for texts (`val_image_recall_at_1`, `val_image_recall_at_5`).

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: the name or folder of a pretrained CLIP model, a configuration of one, or a function without arguments that
      returns a module with a parameter `logit_scale`, whose output for `pixel_values`, `input_ids` and `attention_mask` has
      `image_embeds` and `text_embeds` (default: a small CLIP)
    - `train_data`, `validation_data`: a dataset of `(image, token ids)` or `(image, token ids, attention mask)`, or a function
      that creates it on the worker (default: coloured squares, and captions of their colour and place)
    - `lr` (0.002; with pretrained weights, 0.00001 is usual), `weight_decay` (0.1), `batch_size` per worker (32; a global
      `BATCH_SIZE` overrides it)
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        self.bare = self.make_model(config)
        self.model, self.optimizer = self.register(models=self.bare, optimizers=self.make_optimizer(self.bare, config))
        self.register_data(**self.make_loaders(config, *self.make_data(config), whole_batches=True))

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        return Captioned(960, seed=1), Captioned(96, seed=2)

    def make_model(self, config: Mapping[str, Any]) -> Any:
        given = config.get("model")
        if isinstance(given, str):
            return CLIPModel.from_pretrained(given).train()
        if callable(given) and not isinstance(given, CLIPConfig):
            return given()
        return CLIPModel(CLIPConfig(**SMALL_CLIP) if given is None else given)

    def make_optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Make AdamW, without weight decay for biases, normalization and the temperature, as in CLIP."""
        decay = config.get("weight_decay", 0.1)
        groups = [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": decay},
            {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.get("lr", 2e-3), betas=(0.9, 0.98))

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        with self.autocast():
            images, texts = self.embed(batch)
        loss = self.contrast(images, texts)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": images.size(0)}

    @torch.no_grad()
    def validate(self, val_iterator: Iterable[Any], info: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Validate on one pass over the data. How many images find their text depends on how many texts there are, so this gathers the
        embeddings of all workers before it compares them."""
        self.model.eval()
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in val_iterator:
            with self.autocast():
                images, texts = self.embed(batch)
            own.append((images.cpu(), texts.cpu()))
        every: list[Any] = [own]
        if self.world_size > 1:
            every = [None] * self.world_size
            distributed.all_gather_object(every, own)
        images, texts = (torch.cat(each) for each in zip(*(pair for pairs in every for pair in pairs), strict=True))
        similarity = images @ texts.T
        scale, labels = self.bare.logit_scale.exp().cpu(), torch.arange(len(images))
        loss = (cross_entropy(scale * similarity, labels) + cross_entropy(scale * similarity.T, labels)) / 2
        result = {"batch_count": len(own), "num_samples": sum(len(each) for each, _ in own), "val_loss": loss}
        for name, scores in (("text", similarity), ("image", similarity.T)):
            better = (scores > scores.diagonal().unsqueeze(1)).sum(dim=1)  # how many others are nearer than the own one
            result |= {f"val_{name}_recall_at_{k}": (better < k).float().mean() for k in (1, 5)}
        return result

    def embed(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the embeddings of a batch's images and texts, of length 1 and in single precision."""
        images, tokens, *mask = batch
        output = self.model(pixel_values=images, input_ids=tokens, attention_mask=mask[0] if mask else None)
        return normalize(output.image_embeds.float(), dim=1), normalize(output.text_embeds.float(), dim=1)

    def contrast(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss of this worker's samples among those of all workers."""
        all_images, all_texts, first = self.gather(images, texts)
        scale = self.bare.logit_scale.exp().clamp(max=100)
        labels = torch.arange(first, first + len(images), device=images.device)
        of_images, of_texts = scale * images @ all_texts.T, scale * texts @ all_images.T
        return (cross_entropy(of_images, labels) + cross_entropy(of_texts, labels)) / 2

    def gather(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Gather the embeddings of all workers, with gradients for the workers that computed them, and the number of the first
        one of this worker. Pieces of a batch may have different numbers of samples."""
        if self.world_size == 1:
            return images, texts, 0
        sizes = [torch.zeros(1, dtype=torch.long, device=images.device) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([len(images)], device=images.device))
        counts = [int(size) for size in sizes]
        both = pad(torch.cat([images, texts], dim=1), (0, 0, 0, max(counts) - len(images)))
        # The gradient of this operation is summed over the workers. Averaged over them, as all gradients are, it is that of the
        # mean loss, because with drop_last the workers have equally many samples.
        gathered = [each[:count] for each, count in zip(all_gather(both), counts, strict=True)]
        all_images, all_texts = torch.cat(gathered).split(images.size(1), dim=1)
        return all_images, all_texts, sum(counts[: self.world_rank])


class Captioned(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy images of a square in one of 6 colours and 16 places, and captions of three tokens: colour, row and column, end.
    The 96 kinds take turns. Each sample is generated from its index."""

    def __init__(self, length: int, *, seed: int, noise: float = 0.3) -> None:
        self.length, self.seed, self.noise = length, seed, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"there is no sample {index}: there are {self.length}")
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        place, colour = divmod(index % 96, 6)
        row, column = divmod(place, 4)
        image = self.noise * torch.randn(3, 16, 16, generator=generator)
        levels = torch.tensor([(colour + 1) >> bit & 1 for bit in range(3)])
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 2 * levels.view(3, 1, 1) - 0.5
        return image, torch.tensor([colour + 3, 9 + place, 1])


SMALL_CLIP: dict[str, Any] = {
    "projection_dim": 32,
    "text_config": {
        "vocab_size": 25,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {
        "image_size": 16,
        "patch_size": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}
