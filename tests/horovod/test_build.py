"""The recipe: what it asks for, what it changes, where it keeps the wheel. It is carried out by `make horovod`."""

import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("build_horovod", ROOT / "tools" / "build_horovod.py")
assert SPEC is not None and SPEC.loader is not None
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def sources(root: Path) -> None:
    """As far as the recipe looks at them."""
    standard = "project(x)\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
    for folder in ("", "horovod/torch", "horovod/tensorflow", "horovod/common", "third_party/gloo/gloo/transport/tcp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "CMakeLists.txt").write_text(standard, encoding="utf-8")
    (root / "horovod/common/operations.cc").write_text(
        "    global_gloo_context.Initialize(ParseGlooIface());\n  }\n"
        "    state.process_set_table.Initialize(global_gloo_context);\n  }\n"
        "    // Reset initialization flag\n    horovod_global.initialization_done = false;\n".join(["\n", "\n"]),
        encoding="utf-8",
    )
    (root / "third_party/gloo/gloo/transport/tcp/pair.cc").write_text(
        "  for (auto& op : tx_) {\n    if (op.buf != nullptr) {\n      op.buf->signalException(ex);\n    }\n  }\n",
        encoding="utf-8",
    )


def test_sources_are_mended_once(tmp_path: Path) -> None:
    sources(tmp_path)
    build.mend(tmp_path)
    for folder in ("", "horovod/torch", "horovod/tensorflow"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (tmp_path / folder / "CMakeLists.txt").read_text()
    operations = (tmp_path / "horovod/common/operations.cc").read_text()
    assert operations.count("} catch (const std::exception& error) {") == 2
    assert "initialization_failed = false;\n    horovod_global.initialization_done" in operations
    assert "unbound->signalException(ex);" in (tmp_path / "third_party/gloo/gloo/transport/tcp/pair.cc").read_text()


def test_other_sources_are_refused(tmp_path: Path) -> None:
    sources(tmp_path)
    build.mend(tmp_path)
    with pytest.raises(build.BuildError, match=r"CMakeLists\.txt of Horovod 0\.28\.1 is not as expected.*0 times"):
        build.mend(tmp_path)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(build, "PACKAGES", ("torch", "no_such_package"))
    cmake, compiler, make, packages = build.missing()
    assert "pip install cmake" in cmake and "g++" in compiler and "make" in make
    assert "no_such_package" in packages and "torch," not in packages and "raysgd[horovod]" in packages
    assert build.main([]) == 1
    assert "Horovod was not built: these are missing: cmake" in capsys.readouterr().err


def test_a_kept_wheel_is_installed_as_it_is(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(build, "_run", lambda *arguments: commands.append(arguments))
    folder = build.cache_folder()
    assert folder.parent == cache / "raysgd" and metadata.version("torch") in folder.name
    assert build.cached_wheel() is None
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1-any.whl").touch()
    assert build.main([]) == 0
    assert [command[:2] for command in commands] == [("pip", "install"), ("-c", commands[1][1])]
    assert commands[0][-1] == str(folder / "horovod-0.28.1-any.whl")


def test_a_wheel_belongs_to_its_torch_and_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {build.cache_folder()}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    folders.add(build.cache_folder())
    monkeypatch.setattr(metadata, "version", lambda name: "99.0")
    folders.add(build.cache_folder())
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    folders.add(build.cache_folder())
    assert len(folders) == 4


def test_a_failed_step_shows_its_end() -> None:
    with pytest.raises(build.BuildError, match=r"(?s)failed; it ended so:.*ModuleNotFoundError"):
        build._run("-c", "import no_such_module")
