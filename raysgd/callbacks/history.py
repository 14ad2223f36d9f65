"""Every result of a trainer, as a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from raysgd.callbacks.base import Callback, Result
from raysgd.callbacks.extra import needs
from raysgd.callbacks.plot import drawn
from raysgd.callbacks.rows import OWN, row_of
from raysgd.errors import text_of

__all__ = ["History"]

SHOWN = 10


class History(Callback, Sequence[Mapping[str, Any]]):
    """Owns the rows of one trainer in this process: a list of dictionaries, oldest first. Not part of a checkpoint.

        trainer.history[-1]["train_loss"]
        trainer.history.to_dataframe()
        trainer.history.plot(["train_loss", "val_loss"], path="losses.png")

    A row has `kind` ("train", "validate" or "report"), `epoch`, `step`, `world_size` and `seconds`, and then the metrics
    that were returned. (A metric that has one of these names is called `reported_...`; `epoch` is the same thing.)
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def on_result(self, result: Result) -> None:
        self._rows.append(row_of(result))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Copies: what is done to them changes nothing here."""
        return [dict(row) for row in self._rows]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [dict(row) for row in self._rows if row["kind"] == kind]

    def column(self, name: str) -> list[Any]:
        """One value of each row; None where a row has none."""
        return [row.get(name) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame (extra: callbacks). Values that a row lacks are missing values in it."""
        return needs("pandas", who="history.to_dataframe()").DataFrame(self.rows, columns=self._columns())

    def plot(self, metrics: str | Sequence[str] | None = None, *, path: str | Path | None = None) -> Any:
        """A matplotlib figure (extra: callbacks) of these metrics, or of every number that was returned, over the epochs
        (over `step` where there are none); written to `path` too, if one is given."""
        return drawn(self._rows, [metrics] if isinstance(metrics, str) else list(metrics or ()), path)

    def _columns(self, rows: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
        return list(dict.fromkeys([*OWN, *(name for row in rows or self._rows for name in row)]))

    # -- to look at -----------------------------------------------------------------------------------

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """The newest rows, without what is only for those who look closer."""
        rows = self._rows[-SHOWN:]
        columns = [
            name
            for name in self._columns(rows)
            if not name.startswith(("_", "last_")) and name not in ("step", "profile")
        ]
        return columns, [[_text(row.get(name, "")) for name in columns] for row in rows]

    def __repr__(self) -> str:
        if not self._rows:
            return "History: nothing was measured yet"
        columns, cells = self._shown()
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [columns, *cells]
        ]
        return "\n".join([*self._left_out(), *lines])

    def _repr_html_(self) -> str:
        """For notebooks."""
        columns, cells = self._shown()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in cells)
        note = "".join(f"<p>{line}</p>" for line in self._left_out())
        return f"{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _left_out(self) -> list[str]:
        older = len(self._rows) - SHOWN
        return [f"({older} older rows: history.rows has them)"] if older > 0 else []


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else text_of(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
