"""Text classification with a transformer, on one text or a pair of them, with the metrics of GLUE. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.text_classification import TextClassificationOperator

    name = "distilbert/distilbert-base-uncased"
    config = {"model": name, "tokenizer": name, "train_data": pairs_with_labels, "validation_data": others, "lr": 3e-5, "epochs": 3}
    with TorchTrainer(
        training_operator_cls=TextClassificationOperator, config=config, num_workers=2, scheduler_step_freq="batch"
    ) as trainer:
        trainer.fit(3)
        print(trainer.validate()["val_f1"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from raysgd.operators.recipe import Recipe

try:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from torchmetrics import MetricCollection
    from torchmetrics.classification import (
        BinaryF1Score,
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassMatthewsCorrCoef,
    )
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BertConfig,
        PreTrainedTokenizerFast,
        get_scheduler,
    )
except ImportError as error:
    raise ImportError(
        "raysgd.operators.text_classification needs torchmetrics and transformers: pip install 'raysgd[operators]'"
    ) from error

__all__ = ["TextClassificationOperator", "opinions", "train_tokenizer"]


class TextClassificationOperator(Recipe):
    """Classifies texts, or pairs of texts, as in GLUE's tasks.

    Training reports `train_loss` and `train_accuracy`. Validation reports `val_loss`, `val_accuracy`, `val_f1` and `val_mcc`
    (Matthews' correlation, the metric of CoLA), over all texts of all workers. F1 is that of class 1 if there are two classes, and
    else the mean over the classes. `trainer.predict()` returns the scores.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: the name or folder of a pretrained model, or a configuration of transformers, whose model begins with random
      weights (default: a small BERT)
    - `tokenizer`: the name or folder of one, or an object (default: words, from the training texts)
    - `train_data`, `validation_data`: a sequence of `(text, label)` or `(text, second text, label)`, or a function that
      creates it on the worker (default: whether most words of a text are good ones)
    - `classes` (2), `max_length` of the texts in tokens (128)
    - `epochs`: with it, the learning rate has a `warmup` (0.1 of the steps), then falls to 0 with the `schedule` ("linear") of
      transformers; the trainer needs `scheduler_step_freq="batch"`
    - `lr` (0.001; with pretrained weights, 0.00003 is usual), `weight_decay` (0.01), `batch_size` per worker (32; a global
      `BATCH_SIZE` overrides it)
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        self.classes: int = config.get("classes", 2)
        train_data, validation_data = self.make_data(config)
        self.tokenizer = self.make_tokenizer(config, train_data)
        self.max_length: int = config.get("max_length", 128)
        self.register_data(**self.make_loaders(config, train_data, validation_data, collate_fn=self.collate))
        model = self.make_model(config)
        optimizer = self.make_optimizer(model, config)
        if "epochs" in config:
            self.model, self.optimizer, self.scheduler = self.register(
                models=model, optimizers=optimizer, schedulers=self.make_scheduler(optimizer, config)
            )
        else:
            self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.scores = self.register_metrics(validation=self.make_metrics())

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        rows = opinions()
        return rows[200:], rows[:200]

    def make_tokenizer(self, config: Mapping[str, Any], train_data: Any) -> Any:
        given = config.get("tokenizer")
        if isinstance(given, str):
            return AutoTokenizer.from_pretrained(given)
        return train_tokenizer(text for row in train_data for text in row[:-1]) if given is None else given

    def make_model(self, config: Mapping[str, Any]) -> Any:
        given = config.get("model")
        if isinstance(given, str):
            return AutoModelForSequenceClassification.from_pretrained(given, num_labels=self.classes).train()
        if given is None:
            given = BertConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                max_position_embeddings=self.max_length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        given.num_labels = self.classes
        return AutoModelForSequenceClassification.from_config(given)

    def make_optimizer(self, model: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Make AdamW, without weight decay for biases and normalization, as is usual for transformers."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {
                "params": [each for each in parameters if each.dim() > 1],
                "weight_decay": config.get("weight_decay", 0.01),
            },
            {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.get("lr", 1e-3))

    def make_scheduler(self, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
        steps = self.total_steps(epochs=config["epochs"])
        warmup = round(config.get("warmup", 0.1) * steps)
        return get_scheduler(config.get("schedule", "linear"), optimizer, warmup, steps)

    def make_metrics(self) -> MetricCollection:
        """Make the metrics of a validation, which add up counts over all workers. An F1 score is not a mean of F1 scores."""
        return MetricCollection(
            {
                "val_accuracy": MulticlassAccuracy(self.classes, average="micro"),
                "val_f1": BinaryF1Score() if self.classes == 2 else MulticlassF1Score(self.classes),
                "val_mcc": MulticlassMatthewsCorrCoef(self.classes),
            }
        )

    def collate(self, rows: list[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Make a batch of tokens, padded to the longest text of the batch, and the labels."""
        *texts, labels = zip(*rows, strict=True)
        tokens = self.tokenizer(
            *map(list, texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return dict(tokens), torch.tensor(labels)

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        tokens, labels = batch
        with self.autocast():
            logits = self.model(**tokens).logits.float()
            loss = cross_entropy(logits, labels)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        right = logits.detach().argmax(dim=1) == labels
        return {"train_loss": loss.detach(), "train_accuracy": right.float().mean(), "num_samples": labels.size(0)}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        tokens, labels = batch
        with self.autocast():
            logits = self.model(**tokens).logits.float()
        self.scores.update(logits.argmax(dim=1), labels)
        return {"val_loss": cross_entropy(logits, labels), "num_samples": labels.size(0)}

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> torch.Tensor:
        with self.autocast():
            logits: torch.Tensor = self.model(**batch[0]).logits
        return logits.float()


def train_tokenizer(texts: Iterable[str], vocabulary: int = 8000) -> Any:
    """Train a tokenizer of the words that occur in these texts, with BERT's special tokens."""
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    words.train_from_iterator(texts, trainer)
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


GOOD = ("bright", "calm", "clever", "fresh", "kind", "lively", "neat", "warm")
BAD = ("bland", "clumsy", "dull", "grim", "harsh", "messy", "slow", "stale")


def opinions(count: int = 1200) -> list[tuple[str, int]]:
    """Texts of three to nine words, and whether most of them are good ones. A third of the texts is good."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        number = 3 + 2 * int(torch.randint(4, (1,), generator=generator))
        good = torch.rand(number, generator=generator) < 0.42
        places = torch.randint(len(GOOD), (number,), generator=generator).tolist()
        words = [(GOOD if each else BAD)[place] for each, place in zip(good, places, strict=True)]
        rows.append((" ".join(words), int(good.sum() * 2 > number)))
    return rows
