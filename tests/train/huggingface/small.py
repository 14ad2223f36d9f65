"""Tiny models, data and a training function with a Hugging Face Trainer, for workers and for plain processes.

python -m tests.train.huggingface.small FOLDER '{"samples": 192}'        a plain Trainer, under torchrun
python -m tests.train.huggingface.small FOLDER '{"samples": 192}' 12     an elastic one, which stops at this commit, and then has another
                                                                       process in the place of rank 1
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, WeightedRandomSampler, default_collate
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from raysgd import train
from raysgd.train.huggingface.transformers import prepare_trainer
from tests.faults import Fault
from tests.replicas import FunctionRank, Interrupted

WORDS, LENGTH = 64, 12


class Tokens(Dataset[dict[str, Any]]):
    """Random tokens. The first two of a sample are its number. Of texts, each sample has another number of labels."""

    def __init__(self, size: int, texts: bool, seed: int = 5) -> None:
        random = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, WORDS, (size, LENGTH), generator=random)
        numbers = torch.arange(size)
        self.ids[:, 0], self.ids[:, 1] = numbers // WORDS, numbers % WORDS
        self.labels = torch.randint(0, 3, (size,), generator=random)
        if texts:
            self.labels = self.ids.clone()
            end = torch.randint(3, LENGTH, (size,), generator=random)
            self.labels[torch.arange(LENGTH)[None] >= end[:, None]] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        mask = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": self.labels[index]}


def numbers_of(inputs: dict[str, Any]) -> list[int]:
    ids = inputs["input_ids"]
    return (ids[:, 0] * WORDS + ids[:, 1]).tolist()  # type: ignore[no-any-return]


class MeanLoss(nn.Module):
    """Takes no further arguments, so transformers divides its mean loss by the batches of a step. It has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, classes: Any = None
    ) -> dict[str, Any]:
        logits = self.head(self.norm(self.embed(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, classes if labels is None else labels), "logits": logits}


def loss_of(outputs: dict[str, Any], labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that transformers neither divides nor multiplies, if there are no `labels`."""
    return outputs["loss"]


def without_labels(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = default_collate(samples)
    return {"classes": batch.pop("labels"), **batch}


def make_model(kind: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(11)
    small = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    if kind == "mean":
        return MeanLoss()
    if kind in ("llama", "lora"):
        model = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, attn_implementation="eager"))
        return model if kind == "llama" else with_adapters(model)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**small, **rates, num_labels=3, attn_implementation="eager"))


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def arguments(folder: str, **given: Any) -> TrainingArguments:
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    usual |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 4}
    usual |= {
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "no",
        "weight_decay": 0.01,
    }
    usual |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3}
    return TrainingArguments(output_dir=folder, **{**usual, **given})


# Stops early, and ends with the best model.
STOPPING = {"num_train_epochs": 20, "eval_steps": 5, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
STOPPING |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_entropy", "greater_is_better": False}


def entropy(found: Any) -> dict[str, float]:
    """Return a mean over all samples, which does not depend on the number of workers, as an evaluation's loss does."""
    logits, labels = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
    return {"entropy": float(nn.functional.cross_entropy(logits, labels))}


class Recording(Trainer):  # type: ignore[misc]
    """Fires the faults, and gathers the samples of each step."""

    faults: tuple[Fault, ...] = ()
    marks = ""
    on_place: Any = staticmethod(lambda where, step: None)
    weight = 1.0  # Elastic sets it

    def fault(self, where: str) -> None:
        self.on_place(where, self.state.global_step)
        for each in self.faults:
            if (each.where, each.rank) == (where, train.world_rank()) and self.state.global_step >= each.step:
                if not Path(self.marks, each.name).exists():
                    Path(self.marks, f"time-{each.name}").write_text(str(time.time()))
                each.fire(self.marks)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.weight:
            self.window = [*getattr(self, "window", []), *numbers_of(inputs)]
        self.fault("forward")
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.fault("evaluation")
        return super().evaluate(*args, **kwargs)


class Weighted(Recording):
    """Takes its order from the process's random numbers."""

    def _get_train_sampler(self, *data: Any) -> Any:
        size = len(self.train_dataset)
        return WeightedRandomSampler([1 + each % 3 for each in range(size)], size)


class Means(Recording):
    """Has a loss that is a mean over the batch, though transformers believes that it has divided it by the labels of the step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Ledger(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Owns the samples of each step, which the ranks gather. It pauses after each step with fewer than `ranks`, and after a
    preemption notice, until the worker has left."""

    def __init__(self, trainer: Recording, pause_s: float = 0.0, ranks: int = 99) -> None:
        self.trainer, self.pause_s, self.ranks, self.ledger = trainer, pause_s, ranks, list[list[int]]()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"ledger": self.ledger}}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.fault("before")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.fault("after")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.fault("save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.fault("end")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mine, self.trainer.window = self.trainer.window, []
        everybody: list[Any] = [mine]
        if dist.is_initialized():
            everybody = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
        self.ledger = [*self.ledger, sorted(chain.from_iterable(everybody))]
        if self.trainer.marks:
            Path(self.trainer.marks, f"step-{time.time()}").touch()
        if self.pause_s and train.world_size() < self.ranks:
            time.sleep(self.pause_s)
        if noticed(self.trainer.marks) and not Path(self.trainer.marks, "left").exists():
            time.sleep(0.5)


def noticed(marks: str) -> bool:
    """Return whether a preemption notice has come."""
    return bool(marks) and any(Path(marks).glob("term-*"))


def make_trainer(config: dict[str, Any]) -> Recording:
    kind, samples = config.get("kind", "llama"), config.get("samples", 192)
    args = arguments(config["folder"], **config.get("arguments", {}))
    data: dict[str, Any] = {
        "train_dataset": Tokens(samples, kind in ("llama", "lora")),
        "eval_dataset": Tokens(20, kind in ("llama", "lora"), seed=8),
    }
    if "optimizer" in config:
        data["optimizer_cls_and_kwargs"] = config["optimizer"], {"lr": args.learning_rate}
    if config.get("own_loss"):
        data |= {"compute_loss_func": loss_of, "data_collator": without_labels}
    if "patience" in config:
        data |= {"callbacks": [EarlyStoppingCallback(config["patience"])], "compute_metrics": entropy}
    kind_of_trainer = Means if config.get("means") else Weighted if config.get("weighted") else Recording
    trainer = kind_of_trainer(model=make_model(kind, config.get("dropout", 0.0)), args=args, **data)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ledger(trainer, config.get("pause_s", 0.0), config.get("ranks", 99)))
    return trainer


def result_of(trainer: Recording) -> dict[str, Any]:
    ledgers = [each.ledger for each in trainer.callback_handler.callbacks if isinstance(each, Ledger)]
    return {
        "weights": {name: value.detach().clone() for name, value in trainer.model.named_parameters()},
        "ledger": ledgers[0],
        "losses": [(each["step"], each["loss"]) for each in trainer.state.log_history if "loss" in each],
        "rates": [(each["step"], each["learning_rate"]) for each in trainer.state.log_history if "loss" in each],
        "evaluations": [(each["step"], each["eval_loss"]) for each in trainer.state.log_history if "eval_loss" in each],
        "step": trainer.state.global_step,
        "best": (trainer.state.best_global_step, trainer.state.best_metric),
        "files": sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")),
        "epoch": trainer.state.epoch,
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
    }


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Train with the faults of the config."""
    trainer = make_trainer(config)
    trainer.faults, trainer.marks = config.get("faults", ()), config.get("marks", "")
    trainer.on_place = config.get("on_place", trainer.on_place)
    if noticed(trainer.marks):
        Path(trainer.marks, "left").touch()
    prepare_trainer(trainer, elastic=config.get("elastic", True), seed=config.get("seed")).train()
    return result_of(trainer)


def with_a_replacement(config: dict[str, Any], commit: int) -> dict[str, Any]:
    """Stop at this commit, and let rank 1 begin with rank 0's, which a replacement may get."""
    dist.init_process_group("gloo")
    here = FunctionRank(dist.get_rank(), dist.get_world_size())
    here.stop_at(commit)
    assert isinstance(here.run(train_func, config), Interrupted)
    kept = [here.replica.state()]
    dist.broadcast_object_list(kept)
    here.replica.load(kept[0])
    here.rejoin(dist.get_rank(), dist.get_world_size())
    found: dict[str, Any] = here.run(train_func, config, number=2)
    return found


def main() -> None:
    folder, config, *commit = sys.argv[1], {**json.loads(sys.argv[2]), "folder": sys.argv[1]}, *sys.argv[3:]
    if commit:
        result = with_a_replacement(config, int(commit[0]))
    else:
        trainer = make_trainer(config)
        trainer.train()
        result = result_of(trainer)
    torch.save(result, Path(folder, f"rank{os.environ.get('RANK', 0)}.pt"))


if __name__ == "__main__":
    main()
