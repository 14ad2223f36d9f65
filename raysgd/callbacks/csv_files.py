"""Results as comma-separated values."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from raysgd import storage
from raysgd.callbacks.base import Callback, Result, Run
from raysgd.callbacks.figures import flat
from raysgd.callbacks.rows import row_of

__all__ = ["CSVCallback"]


class CSVCallback(Callback):
    """Writes `train.csv` and `validate.csv` (of a training function, `report.csv`): a line for each result. What the
    files held before stays; a metric that comes later is a further column, empty until then."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given = None if folder is None else Path(folder).expanduser()
        self.folder = self._given

    def on_start(self, run: Run) -> None:
        self.folder = self._given or run.folder

    def on_result(self, result: Result) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path, row = self.folder / f"{result.kind}.csv", flat(row_of(result))
        header, lines = _read(path)
        if set(row) <= set(header):
            with open(path, "a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, header).writerow(row)
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*header, *(name for name in row if name not in header)])
        writer.writeheader()
        writer.writerows([*lines, row])
        storage.write(path, text.getvalue().encode())


def _read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    if not path.exists():
        return [], []
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        lines = list(reader)
        return list(reader.fieldnames or []), lines
