"""Train with three workers, one of which is killed, and take pictures of the run's report: python tools/picture_report.py

The pictures are of the page in the light and in the dark setting, down to the table of ranks. This needs scikit-learn, pillow, and
the browser: apt-get install chromium.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "diagrams"
WIDTH_PX, EPOCHS, KILLED_IN = 960, 8, 3
COLOURS = {"light": 1, "dark": 0}  # Chromium's numbers


def train(path: str) -> None:
    """Train, kill a worker in one epoch, and write the report."""
    import ray
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, random_split

    from raysgd import TorchTrainer, TrainingOperator

    class Digits(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            torch.manual_seed(0)
            torch.set_num_threads(1)
            images, labels = load_digits(return_X_y=True)
            digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
            train, validation = random_split(digits, [1500, 297], generator=torch.Generator().manual_seed(0))
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            self.model, self.optimizer, self.criterion = self.register(
                models=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
                criterion=nn.CrossEntropyLoss(),
            )
            train_loader = DataLoader(train, batch_size=10, shuffle=True)
            self.register_data(train_loader=train_loader, validation_loader=DataLoader(validation, batch_size=99))

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            if batch_info.get("victim") == os.getpid() and batch_info["batch_idx"] == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(
                0.06 if self.world_rank == 2 else 0.04
            )  # a larger model would take this long; one rank is slower
            return super().train_batch(batch, batch_info)

    ray.init(address="local", num_cpus=4, include_dashboard=False)
    with TorchTrainer(training_operator_cls=Digits, num_workers=3, config={"lr": 0.1}) as trainer:
        for epoch in range(1, EPOCHS + 1):
            trainer.train(info={"victim": trainer.apply_all_workers(os.getpid)[1]} if epoch == KILLED_IN else None)
            trainer.validate()
        trainer.report(path)


def picture(page: str, path: Path, scheme: int) -> None:
    """Take a picture of the page, without the space below it."""
    from PIL import Image, ImageChops

    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        flags += ["--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={WIDTH_PX},3000"]
        flags += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={path}", f"file://{page}"]
        subprocess.run(["chromium", *flags], check=True, timeout=60, stderr=subprocess.DEVNULL)
    shown = Image.open(path).convert("RGB")
    box = ImageChops.difference(shown, Image.new("RGB", shown.size, shown.getpixel((0, 0)))).getbbox()
    shown = shown.crop((0, 0, WIDTH_PX, (box or (0, 0, 0, 2988))[3] + 12))
    shown.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "run.html")
        train(str(page))
        upper = page.read_text(encoding="utf-8").partition("<section><h2>Configuration")[0]
        page.write_text(f"{upper}</body></html>", encoding="utf-8")
        for name, scheme in COLOURS.items():
            picture(str(page), FOLDER / f"report_{name}.png", scheme)


if __name__ == "__main__":
    main()
