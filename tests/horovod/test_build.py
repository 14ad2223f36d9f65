"""The script that builds Horovod: what it needs and patches, and where it keeps the wheel. `make horovod` runs it."""

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
    """Write the parts of the sources that the patches change."""
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


def test_sources_are_patched(tmp_path: Path) -> None:
    sources(tmp_path)
    build.apply_patches(tmp_path)
    for folder in ("", "horovod/torch", "horovod/tensorflow"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (tmp_path / folder / "CMakeLists.txt").read_text()
    operations = (tmp_path / "horovod/common/operations.cc").read_text()
    assert operations.count("} catch (const std::exception& error) {") == 2
    assert "initialization_failed = false;\n    horovod_global.initialization_done" in operations
    assert "unbound->signalException(ex);" in (tmp_path / "third_party/gloo/gloo/transport/tcp/pair.cc").read_text()


def test_unexpected_sources_are_refused(tmp_path: Path) -> None:
    sources(tmp_path)
    build.apply_patches(tmp_path)
    with pytest.raises(build.BuildError, match=r"cannot patch CMakeLists\.txt of Horovod 0\.28\.1: .*0 times"):
        build.apply_patches(tmp_path)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(build, "PACKAGES", ("torch", "no_such_package"))
    cmake, compiler, make, packages = build.missing()
    assert "pip install cmake" in cmake and "g++" in compiler and "make" in make
    assert "no_such_package" in packages and "torch," not in packages and "raysgd[horovod]" in packages
    assert build.main([]) == 1
    assert "Horovod was not built: these are missing: cmake" in capsys.readouterr().err


def test_a_cached_wheel_is_installed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
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


def test_the_cache_folder_depends_on_torch_python_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {build.cache_folder()}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    folders.add(build.cache_folder())
    monkeypatch.setattr(metadata, "version", lambda name: "99.0")
    folders.add(build.cache_folder())
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    folders.add(build.cache_folder())
    assert len(folders) == 4


def test_the_error_has_the_end_of_a_commands_output() -> None:
    with pytest.raises(build.BuildError, match=r"(?s)failed\. The end of its output:.*ModuleNotFoundError"):
        build._run("-c", "import no_such_module")
