"""A BERT with random weights learns the topic of generated texts: a linear schedule with warm-up, dropout, clipping.

    python examples/programs/text_classifier.py --workers 2

The same program by hand, and the comparison of both, are tests/programs/test_text_classifier.py.
"""

import argparse
import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.callbacks import PrintCallback

TOPICS = ["goal team match coach league win", "oven salt dough recipe butter taste", "rain wind storm cloud frost sun"]
FILLERS = "the a of and with for after before new old they we"
WORDS = ["[PAD]", "[UNK]", *" ".join([FILLERS, *TOPICS]).split()]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def texts(count, seed):
    """Return texts of 4 to 12 words, a third of which are of one topic, and the number of that topic."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        topic = draw.randrange(len(TOPICS))
        kinds = draw.choices([TOPICS[topic].split(), WORDS[2:]], [1, 2], k=draw.randint(4, 12))
        rows.append((" ".join(map(draw.choice, kinds)), topic))
    return rows


class Topics(TrainingOperator):
    def setup(self, config):
        tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
        tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]")
        order = torch.Generator().manual_seed(3)
        train, held_out = texts(config["rows"], seed=1), texts(150, seed=2)
        self.register_data(
            train_loader=DataLoader(train, config["batch"], True, collate_fn=self.collate, generator=order),
            validation_loader=DataLoader(held_out, batch_size=50, collate_fn=self.collate),
        )
        bert = transformers.BertConfig(vocab_size=len(WORDS), num_labels=len(TOPICS), **SIZES)
        model = transformers.BertForSequenceClassification(bert)  # computes its loss from the labels
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        steps = self.total_steps(epochs=config["epochs"])
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        self.model, self.optimizer, _ = self.register(models=model, optimizers=optimizer, schedulers=schedule)

    def collate(self, rows):
        inputs, labels = zip(*rows, strict=True)
        return {**self.tokenizer(list(inputs), padding=True, return_tensors="pt"), "labels": torch.tensor(labels)}


def main(argv=None):
    """Return the history and the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in {"workers": 1, "epochs": 6, "rows": 1205, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    with TorchTrainer(
        training_operator_cls=Topics,
        num_workers=args.workers,
        config=vars(args),
        scheduler_step_freq="batch",
        seed=0,
        options=TrainingOptions(clip_norm=1.0),
        callbacks=[PrintCallback(["train_loss", "val_loss", "val_accuracy"])],
    ) as trainer:
        return list(trainer.fit(args.epochs)), trainer.get_model()


if __name__ == "__main__":
    main()
