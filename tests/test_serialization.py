"""Pickling for the workers. Pure; no Ray cluster."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Event
from types import ModuleType

import pytest

from raysgd.workers.serialization import is_installed, pack
from tests.peek import forget_other_tests


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_other_tests(monkeypatch, __name__)


def of_this_module() -> str:
    return "sent with its content"


def _is_by_value(packed: object) -> bool:
    return b"sent with its content" in bytes(packed.data)  # type: ignore[attr-defined]


def test_a_folder_whose_parents_import_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").write_text("import outer_package.inner\n1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        import_module("outer_package")
    try:
        assert "outer_package.inner" in sys.modules and "outer_package" not in sys.modules
        assert pack(len)
    finally:
        del sys.modules["outer_package.inner"]


class _Waiting:
    """Says that its pickling has begun, and pickles until the other thread has come as far as it can."""

    def __init__(self, until: Event) -> None:
        self.begun, self.until = Event(), until

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.begun.set()
        self.until.wait(0.5)
        return dict, ()


def test_a_thread_that_ends_first_does_not_end_the_other_ones_pickling() -> None:
    second_has_begun, first_has_ended = Event(), Event()
    one, other = _Waiting(second_has_begun), _Waiting(first_has_ended)
    other.begun = second_has_begun
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pack, [one, of_this_module])
        first.add_done_callback(lambda _: first_has_ended.set())
        assert one.begun.wait(60)
        second = pool.submit(pack, [other, of_this_module])
        assert _is_by_value(first.result(60)) and _is_by_value(second.result(60))


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        (pytest.__file__, True),
        ("/opt/other/lib/python3.11/site-packages/torch/nn/__init__.py", True),  # named by PYTHONPATH or a .pth file
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", True),
        (__file__, False),
        ("/home/user/site-packages-of-mine/model.py", False),
    ],
)
def test_which_files_belong_to_installed_packages(file: str, installed: bool) -> None:
    assert is_installed(file) is installed


@pytest.fixture
def modules_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "with_a_lock.py").write_text(
        "import threading\nLOCK, KEPT = threading.Lock(), []\ndef locked(): return LOCK, KEPT\n"
        "class Held:\n    lock = threading.Lock()\n    def held(self): return self.lock\n"
    )
    (tmp_path / "without_one.py").write_text(
        "from with_a_lock import locked\ndef sent(): return 'its content', locked()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("with_a_lock", "without_one"):
        sys.modules.pop(name, None)


def test_a_module_whose_content_cannot_be_pickled_is_imported_by_workers(modules_beside_the_script: None) -> None:
    with_a_lock, without_one = import_module("with_a_lock"), import_module("without_one")
    for value in (with_a_lock.locked, with_a_lock.Held, without_one.sent):
        packed = pack(value)
        assert packed is not None and b"LOCK" not in bytes(packed.data)
        assert (b"its content" in bytes(packed.data)) == (value is without_one.sent), "others have their content"
    sent = pickle.loads(bytes(pack(without_one.sent).data))  # type: ignore[union-attr]
    assert sent is not without_one.sent and sent()[1] == with_a_lock.locked()


def test_the_variable_of_a_script_that_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    exec("import threading\nPAGES, LOCK = 3, threading.Lock()\ndef locked(): return LOCK", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"locked.* cannot be sent .*the variable LOCK of the script .*_thread\.lock"):
        pack(main.locked)
