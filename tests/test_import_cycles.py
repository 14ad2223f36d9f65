"""No file of the library imports another in a circle, not even in functions. tools/check_code.py checks the layers."""

from graphlib import TopologicalSorter

from tools.check_code import FILES, imports_of, name_of


def test_no_import_cycles() -> None:
    graph = {name_of(path): {n for n in imports_of(path)[0] if not n.endswith("__init__")} for path in FILES}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
