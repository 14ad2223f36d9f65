"""Keep every result of a trainer as a table, and plot it. Driver."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.callbacks.report import Timeline, page
from raysgd.callbacks.writers import ROW_FIELDS, import_extra, measured_names, row_of, scalars
from raysgd.core.decisions.policy import Recovery
from raysgd.errors import ConfigError, text_of
from raysgd.storage import locations

MAX_SHOWN = 10


class Rows(list[dict[str, Any]]):
    """Rows of a history."""

    def column(self, name: str) -> list[Any]:
        """The value `name` of each row that has one."""
        return [row[name] for row in self if row.get(name) is not None]


class History(Callback, Sequence[Mapping[str, Any]]):
    """Owns the rows of one trainer in this process: a list of dictionaries, oldest first. Automatic
    checkpoints contain it, so a resumed trainer has the earlier rows, too.

        trainer.history[-1]["train_loss"]
        min(trainer.history.of("validate").column("val_loss"))
        trainer.history.to_dataframe()
        trainer.history.plot(["train_loss", "val_loss"], path="losses.png")

    A row has `kind` ("train", "validate", "test" or "report"), `epoch`, `step`, `world_size` and
    `seconds`, and then the metrics that were returned. A metric with one of these names is renamed
    to `reported_...`, unless it is the same epoch.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._timeline = Timeline()

    def on_start(self, run: Run) -> None:
        self._timeline.run = run

    def on_resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]

    def on_progress(self, now: Underway) -> None:
        self._timeline.see_progress(now)

    def on_result(self, result: CallResult) -> None:
        row = row_of(result)
        self._timeline.see_result(result, row)
        self._rows.append(row)

    def on_recovery(self, recovery: Recovery) -> None:
        self._timeline.recoveries.append(recovery)

    def note(self, values: Mapping[str, Any]) -> None:
        """Add values to the newest row, if there is one."""
        if self._rows:
            self._rows[-1].update(values)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Copies of all rows."""
        return [dict(row) for row in self._rows]

    def of(self, kind: str) -> Rows:
        """Copies of the rows of one `kind`: "train", "validate", "test" or "report".
        `of(kind).column(name)` returns the values of those that have this one."""
        return Rows(dict(row) for row in self._rows if row["kind"] == kind)

    def column(self, name: str) -> list[Any]:
        """The value `name` of each row, or None for rows without it: see `of`."""
        return [row.get(name) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [dict(row) for row in self._rows[index]]
        return dict(self._rows[index])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def to_dataframe(self) -> Any:
        """Make a pandas DataFrame (extra: history)."""
        pandas = import_extra("pandas", user="history.to_dataframe()")
        return pandas.DataFrame(self.rows, columns=self._columns(self._rows))

    def plot(self, metrics: str | Sequence[str] | None = None, *, path: str | Path | None = None) -> Any:
        """Make a matplotlib figure (extra: history) of these `metrics`, by default of all numbers
        except counts, over the epochs, or over `step` if there are none. With `path`, also save
        it."""
        plotting = import_extra("matplotlib.figure", user="history.plot()")
        rows = [scalars(row) for row in self._rows]
        names = _plotted([metrics] if isinstance(metrics, str) else list(metrics or ()), rows)
        figure = _notebook_figure(plotting.Figure)(figsize=(7, 2.2 * len(names) + 0.6), layout="constrained")
        x = "epoch" if all(row.get("epoch") is not None for row in self._rows) else "step"
        for name, axes in zip(names, figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], strict=True):
            points = [(row[x], row[name]) for row in rows if name in row]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
        axes.set_xlabel(x)
        if path is not None:
            figure.savefig(path)
        return figure

    def report(self, path: str | os.PathLike[str]) -> str:
        """Write one HTML page at `path`, which needs no other file and no network, and return its
        path: the metrics, the speed and the workers over time, the recoveries with the seconds of
        their parts, slow ranks, and the table of results."""
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"report() needs the path of the HTML file to write, such as 'run.html', got {path!r}")
        place = locations.place_to_save(path)
        if isinstance(place, Path) and place.is_dir():
            raise ConfigError(
                f"report() writes a file, and {place} is a directory: pass a path such as {place / 'run.html'}"
            )
        return locations.text_of(locations.write(place, page(self.rows, self._timeline).encode()))

    def _columns(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        return list(dict.fromkeys([*ROW_FIELDS, *(name for row in rows for name in row)]))

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """The header and the newest rows as text, without columns for debugging."""
        rows = self._rows[-MAX_SHOWN:]
        columns = [name for name in self._columns(rows) if not name.startswith(("_", "last_")) and name != "profile"]
        return columns, [[_cell(row.get(name, "")) for name in columns] for row in rows]

    def __repr__(self) -> str:
        if not self._rows:
            return "History: no results yet"
        columns, cells = self._table()
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [columns, *cells]
        ]
        return "\n".join([*self._omitted(), *lines])

    def _repr_html_(self) -> str:
        columns, cells = self._table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in cells)
        note = "".join(f"<p>{line}</p>" for line in self._omitted())
        return f"{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _omitted(self) -> list[str]:
        older = len(self._rows) - MAX_SHOWN
        return [f"({older} older rows: history.rows has them)"] if older > 0 else []


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else text_of(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _plotted(metrics: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Choose which metrics to plot. Raise `ConfigError` if one was never measured."""
    measured = list(dict.fromkeys(name for row in rows for name in row))
    names = list(metrics) or measured_names(rows)
    missing = [name for name in names if name not in measured]
    if missing or not names:
        raise ConfigError(
            f"there is nothing to plot for {', '.join(missing) or 'this history'}: "
            f"the numbers that were measured are {', '.join(measured) or 'none yet'}"
        )
    return names


def _notebook_figure(figure: Any) -> Any:
    """Make a figure class that notebooks display. (pyplot would keep each figure.)"""

    def image(self: Any) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    return type("Figure", (figure,), {"_repr_png_": image})
