"""A small Llama from scratch, and then fine-tuned with LoRA on documents with other rules.

Nothing is downloaded: the documents are generated, and the model is made from a configuration. For a pretrained model,
set `model` and `tokenizer` to its name, and `train_data` to texts.

    python examples/fine_tuning.py --num-workers 2
"""

import argparse
import tempfile

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.fine_tuning import FineTuningOperator, markov_documents


def train(name, epochs, workers, config, folder):
    """Train on one set of documents, print each epoch, and save the model or its adapters in transformers' format."""
    config = {**config, "end": 0, "epochs": epochs, BATCH_SIZE: 8}
    with TorchTrainer(
        training_operator_cls=FineTuningOperator, num_workers=workers, config=config, scheduler_step_freq="batch"
    ) as trainer:
        print(f"{name}, before: val_perplexity {trainer.validate()['val_perplexity']:.2f}")
        for _ in range(epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_perplexity {val['val_perplexity']:.2f}  over {val['val_tokens']:.0f} tokens",
                flush=True,
            )
        trainer.apply_all_operators(lambda operator: operator.save_pretrained(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()
    epochs = 5 if args.smoke else args.epochs

    first, other = markov_documents(), markov_documents(shift=1)
    with tempfile.TemporaryDirectory() as folder:
        config = {"train_data": first[80:], "validation_data": first[:80]}
        train("from scratch", epochs, args.num_workers, config, f"{folder}/base")
        lora = {"r": 16, "target_modules": "all-linear"}
        config = {"model": f"{folder}/base", "lora": lora, "lr": 0.02}
        config |= {"train_data": other[80:], "validation_data": other[:80]}
        train("fine-tuned", epochs, args.num_workers, config, f"{folder}/adapter")


if __name__ == "__main__":
    main()
