"""Write results as comma-separated values. Driver."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import CallResult, Run
from raysgd.callbacks.writers import Writer, flat, row_of
from raysgd.errors import text_of
from raysgd.storage import locations


class CSVCallback(Writer):
    """Writes `train.csv` and `validate.csv` (for a training function, `report.csv`), one line per
    result, in `folder` (by default the log folder). Appends to existing files. A metric that
    appears later becomes a new column, which is empty in the lines before. With `log_every=n`, also
    `batch.csv`, with a line about every n batches."""

    def __init__(self, folder: str | Path | None = None, *, log_every: int | None = None) -> None:
        super().__init__(log_every)
        self._user_folder = None if folder is None else Path(folder).expanduser()
        self.folder = self._user_folder
        self._headers: dict[Path, list[str]] = {}

    def on_start(self, run: Run) -> None:
        self.folder = self._user_folder or run.folder
        self._headers.clear()

    def on_result(self, result: CallResult) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path, row = self.folder / f"{result.kind}.csv", _cells(flat(row_of(result)))
        header = self._headers.pop(path, [])  # if writing fails, the next row is not appended to what was written
        if header and set(row) <= set(header):
            with open(path, "a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, header).writerow(row)
        else:
            header = _rewrite(path, row)
        self._headers[path] = header


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value if value is None else text_of(value) for name, value in row.items()}


def _rewrite(path: Path, row: dict[str, Any]) -> list[str]:
    """Write the file again with one more row, which may have new columns. Return the header."""
    header, lines = _read(path)
    header += [name for name in row if name not in header]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, header)
    writer.writeheader()
    writer.writerows([*lines, row])
    locations.write(path, text.getvalue().encode())
    return header


def _read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    if not path.exists():
        return [], []
    text = path.read_bytes().decode(errors="replace")
    header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    lines = [dict(zip(header, row, strict=False)) for row in rows if row]
    is_within_quotes = text.count('"') % 2 == 1
    if text.endswith("\n") and not is_within_quotes:
        return header, lines
    # The process was killed, or the disk full, in the middle of a line.
    return (header, lines[:-1]) if rows else ([], [])
