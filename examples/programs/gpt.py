"""A character-level GPT: drawn windows of a text, bfloat16, accumulation, clipping, warm-up and a cosine.

The text is the reference of Python's language, which every Python contains.

    python examples/programs/gpt.py --workers 2
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.callbacks import PrintCallback
from raysgd.constants import BATCH_SIZE

TEXT = "\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))
CUT = len(TEXT) * 9 // 10


def windows(text, length):
    """Return all windows of this length, each with the same window one letter later."""
    codes = {letter: code for code, letter in enumerate(LETTERS)}
    found = torch.tensor([codes[letter] for letter in text]).unfold(0, length + 1, 1)
    return TensorDataset(found[:, :-1], found[:, 1:])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.attention(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, length, width, heads, layers):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, codes):
        x = self.blocks(self.letters(codes) + self.places.weight[: codes.shape[1]])
        return self.head(x).transpose(1, 2)  # (batch, letters, length), as CrossEntropyLoss takes it

    @torch.no_grad()
    def continued(self, text, count, seed=0):
        generator, length = torch.Generator().manual_seed(seed), self.places.num_embeddings
        for _ in range(count):
            codes = torch.tensor([[LETTERS.index(letter) for letter in text[-length:]]])
            text += LETTERS[self(codes)[0, :, -1].softmax(0).multinomial(1, generator=generator)]
        return text


def rate(step, steps, warm_up):
    """Return the part of the learning rate in an optimizer's step: rises in a line, then falls to a tenth on a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min((step - warm_up) / (steps - warm_up), 1))


class Writer(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = GPT(config["length"], config["width"], config["heads"], config["layers"])
        train, validation = (windows(text, config["length"]) for text in (TEXT[:CUT], TEXT[CUT:]))
        drawn = RandomSampler(train, True, config["windows"], torch.Generator().manual_seed(1))
        spread = range(0, len(validation), len(validation) // config["validated"])
        self.register_data(
            train_loader=DataLoader(train, config[BATCH_SIZE], sampler=drawn),
            validation_loader=DataLoader(validation, config[BATCH_SIZE], sampler=spread),
        )
        matrices, vectors = ([each for each in model.parameters() if (each.dim() > 1) == big] for big in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.99))
        steps = self.total_steps(epochs=config["epochs"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps, steps // 10))
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(), schedulers=schedule
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"workers": 1, "epochs": 10, "batch": 32, "windows": 4096, "validated": 256, "accumulate": 4, "lr": 3e-3}
    for name, size in {**sizes, "length": 64, "width": 64, "heads": 4, "layers": 4, "precision": "bf16"}.items():
        parser.add_argument(f"--{name}", type=type(size), default=size)
    args = parser.parse_args(argv)
    with TorchTrainer(
        training_operator_cls=Writer,
        num_workers=args.workers,
        config={**vars(args), BATCH_SIZE: args.batch},
        options=TrainingOptions(precision=args.precision, accumulate=args.accumulate, clip_norm=1.0),
        scheduler_step_freq="step",
        callbacks=[PrintCallback(["train_loss", "val_loss", "val_accuracy"])],
    ) as trainer:
        history, model = list(trainer.fit(args.epochs)), trainer.get_model()
    print(model.continued("The ", 200))
    return history, model


if __name__ == "__main__":
    main()
