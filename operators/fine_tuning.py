"""Causal language models of transformers: fine-tuning, with LoRA or of all weights, on packed documents. Worker.

Example:
    from raysgd import TorchTrainer
    from raysgd.operators.fine_tuning import FineTuningOperator

    config = {"model": "Qwen/Qwen3-0.6B", "tokenizer": "Qwen/Qwen3-0.6B", "train_data": my_texts, "lora": {"r": 16}, "epochs": 2}
    with TorchTrainer(
        training_operator_cls=FineTuningOperator, config=config, num_workers=4, scheduler_step_freq="batch"
    ) as trainer:
        trainer.fit(2)
        trainer.apply_all_operators(lambda operator: operator.save_pretrained("adapter"))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raysgd.operators.language_model import markov_tokens
from raysgd.operators.recipe import Recipe

try:
    from peft import LoraConfig, get_peft_model
    from torchmetrics import MeanMetric, MetricCollection, SumMetric
    from torchmetrics.classification import MulticlassAccuracy
    from torchmetrics.text import Perplexity
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_scheduler
except ImportError as error:
    raise ImportError(
        "raysgd.operators.fine_tuning needs peft, torchmetrics and transformers: pip install 'raysgd[operators]'"
    ) from error

__all__ = ["FineTuningOperator", "markov_documents", "packed"]

NO_LABEL = -100  # the label of tokens that are not to be predicted, in transformers as in torch


class FineTuningOperator(Recipe):
    """Trains a causal language model on documents that are packed into blocks without padding. A sample is a block.

    Training reports `train_loss` (nats per predicted token). Validation reports `val_loss`, `val_perplexity`,
    `val_token_accuracy` and `val_tokens`, over the predicted tokens of all workers.

    Everything in `config` is optional. For what a setting cannot express, override a `make_` method:

    - `model`: the name or folder of a pretrained model, or a configuration of transformers, whose model begins with random
      weights (default: a small Llama for 64 tokens); `model_args`: more arguments for it, such as `dtype`
    - `lora`: arguments for peft's `LoraConfig`. Only the adapters are trained then. Without it, all weights are
    - `train_data`, `validation_data`: documents, or a function that creates them on the worker. A document is a text, a list
      of token ids, or a dict with `input_ids` and `labels`, where -100 means that a token is not to be predicted, as in a prompt
    - `tokenizer`: the name or folder of one, or an object, for documents that are texts
    - `block_size` (64 tokens), `end`: a token id that follows each document (default: that of the tokenizer)
    - `epochs`: with it, the learning rate has a `warmup` (0.05 of the steps), then falls to 0 with the `schedule` ("cosine") of
      transformers; the trainer needs `scheduler_step_freq="batch"`
    - `gradient_checkpointing` (False): less memory, more time
    - `lr` (0.003; with pretrained weights, 0.0001 is usual), `weight_decay` (0.0), `batch_size` in blocks per worker (8; a global
      `BATCH_SIZE` overrides it)
    """

    default_batch_size = 8

    def setup(self, config: Mapping[str, Any]) -> None:
        model = self.make_model(config)
        optimizer = self.make_optimizer(model, config)
        self.register_data(**self.make_loaders(config, *self.make_data(config)))
        self.bare = model
        if "epochs" in config:
            self.model, self.optimizer, self.scheduler = self.register(
                models=model, optimizers=optimizer, schedulers=self.make_scheduler(optimizer, config)
            )
        else:
            self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.scores = self.register_metrics(validation=self.make_metrics(model.config.vocab_size))

    def make_model(self, config: Mapping[str, Any]) -> Any:
        given, options = config.get("model", SMALL_LLAMA), config.get("model_args", {})
        if isinstance(given, (str, bytes)) or hasattr(given, "__fspath__"):
            model = AutoModelForCausalLM.from_pretrained(given, **options).train()
        else:
            given = LlamaConfig(**given) if isinstance(given, dict) else given
            model = AutoModelForCausalLM.from_config(given, **options)
        # With a cache, which is for generating, transformers ignores where documents begin.
        model.config.use_cache = False
        if config.get("gradient_checkpointing", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if "lora" in config:
            model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **config["lora"]}))
        return model

    def make_optimizer(self, model: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=config.get("lr", 3e-3), weight_decay=config.get("weight_decay", 0.0))

    def make_scheduler(self, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
        steps = self.total_steps(epochs=config["epochs"])
        warmup = round(config.get("warmup", 0.05) * steps)
        return get_scheduler(config.get("schedule", "cosine"), optimizer, warmup, steps)

    def default_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        documents = markov_documents()
        return documents[80:], documents[:80]

    def make_data(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        """Make the blocks for training and for validation. The second may be None."""
        train_data, validation_data = super().make_data(config)
        tokenizer = config.get("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
        end = config.get("end", getattr(tokenizer, "eos_token_id", None))

        def blocks(documents: Any) -> TensorDataset:
            return packed([as_tokens(each, tokenizer) for each in documents], config.get("block_size", 64), end)

        return blocks(train_data), None if validation_data is None else blocks(validation_data)

    def make_metrics(self, vocabulary: int) -> MetricCollection:
        """Make the metrics of a validation, which add up over the tokens of all workers before they divide."""
        counted: dict[str, Any] = {"ignore_index": NO_LABEL}
        return MetricCollection(
            {
                "val_loss": MeanMetric(),
                "val_tokens": SumMetric(),
                "val_perplexity": Perplexity(**counted),
                "val_token_accuracy": MulticlassAccuracy(vocabulary, average="micro", **counted),
            },
            compute_groups=False,
        )

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        with self.autocast():
            scores, labels = self.scored(batch)
            loss = cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
        self.zero_grad(self.optimizer)
        # Divided by a number that all blocks have in common, each token counts as much, whichever worker has its block.
        self.backward(loss / labels.numel())
        self.step(self.optimizer)
        counted = (labels != NO_LABEL).sum()
        return {"train_loss": (loss.detach() / counted.clamp(min=1), counted), "num_samples": labels.size(0)}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        with self.autocast():
            scores, labels = self.scored(batch)
        if (labels != NO_LABEL).any():
            loss = cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
            self.scores["val_loss"].update(loss, (labels != NO_LABEL).sum())
            self.scores["val_tokens"].update((labels != NO_LABEL).sum())
            self.scores["val_perplexity"].update(scores, labels)
            self.scores["val_token_accuracy"].update(scores.argmax(dim=2), labels)
        return {"num_samples": labels.size(0)}

    def scored(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the scores of each token's successor, in single precision, and the successors."""
        tokens, labels, positions = batch
        scores = self.model(input_ids=tokens, position_ids=positions).logits[:, :-1].float()
        return scores, labels[:, 1:]

    def save_pretrained(self, path: str) -> None:
        """Save the adapters, or the whole model, in the format of peft and transformers. Only rank 0 writes."""
        if self.world_rank == 0:
            self.bare.save_pretrained(path)


def as_tokens(document: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Convert one document to token ids and labels."""
    if isinstance(document, str) and tokenizer is None:
        raise ValueError(
            f'the document {document[:40]!r} is a text, and there is no tokenizer: pass config["tokenizer"], or token ids'
        )
    if isinstance(document, str):
        document = tokenizer(document, add_special_tokens=False)["input_ids"]
    tokens = list(document["input_ids"] if isinstance(document, Mapping) else document)
    labels = list(document.get("labels", tokens)) if isinstance(document, Mapping) else tokens
    return tokens, labels


def packed(documents: Iterable[tuple[Sequence[int], Sequence[int]]], size: int, end: int | None) -> TensorDataset:
    """Pack documents one after the other into blocks `(tokens, labels, positions)`, without padding. Documents without tokens are
    left out, and the last tokens, which do not fill a block.

    Positions begin at 0 in each document and block. From that, the models of transformers see where a document begins, and no
    token attends to those of an earlier document. A document's first token is not predicted."""
    tokens, labels, starts = [], [], [0]
    last = [] if end is None else [end]
    for own, targets in documents:
        if len(own) != len(targets):
            raise ValueError(
                f"a document's number of labels is {len(targets)}, and that of its tokens is {len(own)}. All later labels would belong "
                f"to other tokens. Give each token a label, {NO_LABEL} if it is not to be predicted"
            )
        if len(own) == 0:
            continue
        tokens += [*own, *last]
        labels += [NO_LABEL, *targets[1:], *last]
        starts.append(len(tokens))
    count = len(tokens) // size
    if count == 0:
        raise ValueError(
            f'{len(tokens)} tokens do not fill one block of {size}: pass more documents, or a smaller config["block_size"]'
        )
    positions = torch.cat([torch.arange(after - before) for before, after in pairwise(starts)])
    blocks = [torch.tensor(each[: count * size]).view(count, size) for each in (tokens, labels)]
    positions = positions[: count * size].view(count, size)
    # A document that continues in a block begins at 0 again: the smaller of its positions in the document and in the block.
    return TensorDataset(*blocks, torch.minimum(positions, torch.arange(size)))


def markov_documents(count: int = 480, *, shift: int = 0) -> list[list[int]]:
    """Make documents of 10 to 40 tokens, in which each token has four equally probable successors, and 0 is not used."""
    lengths = torch.randint(10, 41, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = (markov_tokens(sum(lengths), vocabulary=63) + shift) % 63 + 1
    return [part.tolist() for part in tokens.split(lengths)]


SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
