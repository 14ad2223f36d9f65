"""What is known of the rows of the data that an operator for PyTorch has registered. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.replica.calls import Phase
from raysgd.replica.operator_base import each_loader
from raysgd.torch.data.rows import LoaderRows
from raysgd.torch.data.sampling import is_planned
from raysgd.torch.internals import TorchInternals


class RegisteredRows:
    """Knows the rows of what an operator has registered, by the names of `register_data`."""

    def __init__(self, internals: TorchInternals, data_names: Mapping[Phase, str]) -> None:
        self._internals, self._data_names = internals, data_names
        self._described: dict[str, tuple[Any, LoaderRows]] = {}  # with the loaders

    def loaders(self, phase: Phase) -> dict[str, Any]:
        """The registered data, or each of several loaders, by what errors call it."""
        name = self._data_names[phase]
        return dict(each_loader(name, getattr(self._internals.registered, name)))

    def known(self, *phases: Phase) -> dict[str, LoaderRows]:
        """What is known of the rows of the registered data, by its name, if raysgd divides it by
        index among the ranks."""
        loaders = {name: loader for phase in phases for name, loader in self.loaders(phase).items()}
        divided = self._internals.settings.divides_data
        for name, loader in loaders.items():
            if name not in self._described or self._described[name][0] is not loader:
                rows = LoaderRows.of(loader) if divided and is_planned(loader) else LoaderRows()
                self._described[name] = loader, rows
        return {name: self._described[name][1] for name in loaders}
