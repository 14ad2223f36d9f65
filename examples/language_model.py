"""A small GPT on tokens from a random source, whose own perplexity no model can beat.

Each token is followed by one of four, evenly: a model that knows nothing has a perplexity of 64 (the
vocabulary), one that has learned the source approaches 4.

    python examples/language_model.py --num-workers 2
"""

import argparse

from raysgd import TorchTrainer
from raysgd.operators.language_model import LanguageModelOperator


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs, a smaller model")
    args = parser.parse_args()

    config = {"batch_size": 16 // args.num_workers, "width": 32 if args.smoke else 64, "lr": 0.01}
    with TorchTrainer(
        training_operator_cls=LanguageModelOperator, num_workers=args.num_workers, config=config
    ) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_perplexity {val['val_perplexity']:.2f}  over {val['val_tokens']:.0f} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
