"""A fine-tuning for a classification, in the manner of transformers' run_glue.py. Of raysgd it knows nothing.

torchrun --nproc-per-node 2 -m tests.train.scripts.glue --output_dir FOLDER --num_train_epochs 3 ...
"""

import sys
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

GOOD, BAD = ["good", "fine", "great", "lovely"], ["bad", "poor", "awful", "dull"]
OTHER = ["the", "film", "was", "and", "its", "end", "a", "story", "of", "people"]


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32, metadata={"help": "The width of the model."})
    dropout: float = field(default=0.0, metadata={"help": "The rate of dropout."})


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=16, metadata={"help": "Longer sentences are cut."})
    max_train_samples: int = field(default=128, metadata={"help": "How many sentences to train with."})
    max_eval_samples: int = field(default=40, metadata={"help": "How many sentences to evaluate."})


def sentences(count, seed):
    random = np.random.default_rng(seed)
    for _ in range(count):
        label = int(random.integers(2))
        words = [*random.choice(OTHER, random.integers(3, 9)), *random.choice((BAD, GOOD)[label], 2)]
        yield {"sentence": " ".join(random.permutation(words)), "label": label}


def make_tokenizer():
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def compute_metrics(prediction):
    guesses = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": float((guesses == prediction.label_ids).mean())}


def main(arguments=None):
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(arguments)
    set_seed(training_args.seed)

    tokenizer = make_tokenizer()

    def preprocess(example):
        found = tokenizer(example["sentence"], max_length=data_args.max_seq_length, truncation=True)
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": example["label"]}

    train_dataset = [preprocess(each) for each in sentences(data_args.max_train_samples, seed=1)]
    eval_dataset = [preprocess(each) for each in sentences(data_args.max_eval_samples, seed=2)]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        intermediate_size=2 * model_args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=model_args.dropout,
        attention_probs_dropout_prob=model_args.dropout,
        num_labels=2,
    )
    model = AutoModelForSequenceClassification.from_config(config)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )

    if training_args.do_train:
        train_result = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
