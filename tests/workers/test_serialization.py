"""Pickling for the workers. Pure; no Ray cluster."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Event, Lock
from types import ModuleType

import pytest

from raysgd.environment import is_installed
from raysgd.workers import serialization
from raysgd.workers.serialization import pack


def of_this_module() -> str:
    return "sent with its content"


def _is_by_value(packed: object) -> bool:
    return b"sent with its content" in bytes(packed.data)  # type: ignore[attr-defined]


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


def test_only_modules_that_the_object_uses_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can have thousands of modules, each of which takes milliseconds."""
    looked, look = list[str](), serialization.find_unpicklable_variable

    def noting(module: ModuleType) -> str:
        looked.append(module.__name__)
        return look(module)

    monkeypatch.setattr(serialization, "find_unpicklable_variable", noting)
    with pytest.raises(TypeError, match="cannot be sent"):
        pack([of_this_module, Lock()])
    assert set(looked) == {__name__, "__main__"}


@pytest.fixture
def modules_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "with_a_lock.py").write_text(
        "import threading\nLOCK, KEPT = threading.Lock(), []\ndef locked(): return LOCK, KEPT\n"
        "class Held:\n    lock = threading.Lock()\n    def held(self): return self.lock\n"
    )
    (tmp_path / "without_one.py").write_text(
        "from with_a_lock import locked\ndef sent(): return 'its content', locked()\n"
    )
    (tmp_path / "in_a_package").mkdir()
    (tmp_path / "in_a_package" / "__init__.py").write_text(
        "from .with_a_lock import locked\ndef sent(): return locked()\n"
    )
    (tmp_path / "in_a_package" / "with_a_lock.py").write_text((tmp_path / "with_a_lock.py").read_text())
    (tmp_path / "with_torchscript.py").write_text(
        "import torch\n@torch.jit.script\ndef doubled(x: int) -> int:\n    return 2 * x\ndef used(): return doubled(2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("with_torchscript", "with_a_lock", "without_one", "in_a_package", "in_a_package.with_a_lock"):
        sys.modules.pop(name, None)


def test_a_module_whose_content_cannot_be_pickled_is_imported_by_workers(modules_beside_the_script: None) -> None:
    with_a_lock, without_one = import_module("with_a_lock"), import_module("without_one")
    for value in (with_a_lock.locked, with_a_lock.Held, without_one.sent):
        packed = pack(value)
        assert packed is not None and b"LOCK" not in bytes(packed.data)
        assert (b"its content" in bytes(packed.data)) == (value is without_one.sent), "others have their content"
    sent = pickle.loads(bytes(pack(without_one.sent).data))  # type: ignore[union-attr]
    assert sent is not without_one.sent and sent()[1] == with_a_lock.locked()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_with_a_script_function_of_torch_is_imported_by_workers(modules_beside_the_script: None) -> None:
    used = import_module("with_torchscript").used
    assert pickle.loads(bytes(pack(used).data)) is used and used() == 4  # type: ignore[union-attr]


def test_a_module_of_a_package_is_imported_although_the_package_is_sent(modules_beside_the_script: None) -> None:
    package = import_module("in_a_package")
    sent = pickle.loads(bytes(pack(package.sent).data))  # type: ignore[union-attr]
    assert sent is not package.sent and sent() == package.locked()


def test_a_worker_that_starts_later_has_what_the_script_has(modules_beside_the_script: None, tmp_path: Path) -> None:
    without_one = import_module("without_one")
    without_one.SET_BY_THE_SCRIPT = 5
    exec("def state(): return SET_BY_THE_SCRIPT", vars(without_one))
    packed = bytes(pack(without_one.state).data)  # type: ignore[union-attr]
    (tmp_path / "without_one.py").write_text("raise AssertionError('this file was edited meanwhile')")
    del sys.modules["without_one"]
    assert pickle.loads(packed)() == 5


def test_the_variable_of_a_script_that_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    exec("import threading\nPAGES, LOCK = 3, threading.Lock()\ndef locked(): return LOCK", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"locked.* cannot be sent .*the variable LOCK of the script .*_thread\.lock"):
        pack(main.locked)
