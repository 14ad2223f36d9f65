"""Forecasting: one model for many time series, which predicts quantiles of the next values.

The series are generated. With real data, only `series`, `history`, `horizon` and `season` change.

    python examples/forecasting.py --num-workers 2
"""

import argparse

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.forecasting import ForecastingOperator, seasonal_series


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    config = {"series": seasonal_series, "history": 48, "horizon": 12, "season": 12, BATCH_SIZE: 64}
    with TorchTrainer(
        training_operator_cls=ForecastingOperator, num_workers=args.num_workers, config=config
    ) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}  val_wql {val['val_wql']:.4f}"
                f"  val_mase {val['val_mase']:.3f}  val_coverage {val['val_coverage']:.3f}",
                flush=True,
            )
        quantiles = trainer.predict([each[-48:] for each in seasonal_series(3)])
    for number, (low, median, high) in enumerate(quantiles[:, 0].tolist()):
        print(f"next value of series {number}: {median:.2f}, probably between {low:.2f} and {high:.2f}")


if __name__ == "__main__":
    main()
