"""Builds Horovod for the installed torch, and installs it: `python tools/build_horovod.py`.

Horovod has no wheels, and its last release does not compile against a current torch without changes.

    look in the cache for a wheel for this torch and this Python
    if there is none: check the tools; download the sources; patch them (`PATCHES`); compile; keep the wheel
    install the wheel; import it once
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

VERSION = "0.28.1"
PACKAGES = ("torch", "cffi", "cloudpickle", "packaging", "psutil", "yaml", "setuptools", "wheel")
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # its dependencies ask for versions that CMake 4 no longer supports
}
# Horovod's own variables that change what is built.
BUILD_VARIABLES = (
    "HOROVOD_GPU",
    "HOROVOD_CUDA",
    "HOROVOD_NCCL",
    "HOROVOD_ALLOW_MIXED",
    "HOROVOD_BUILD",
    "HOROVOD_LOCAL_VERSION",
)


class Patch(NamedTuple):
    """Replaces `old`, a pattern that occurs once in `file`, with `new`."""

    file: str
    old: str
    new: str


# A current torch requires C++20. The other patches are about failures: as released, an error during the rendezvous ends the
# process, the next rendezvous fails too, and a queued send never gets an error.
PATCHES = (
    *(
        Patch(f"{folder}CMakeLists.txt", r"(set\(CMAKE_CXX_STANDARD) 1[47]\)(?=\s*\n)", r"\1 20)")
        for folder in ("", "horovod/torch/", "horovod/tensorflow/")
    ),
    *(
        Patch(
            "horovod/common/operations.cc",
            rf"\n    ({re.escape(call)};)\n",
            r"""
    try {
      \1
    } catch (const std::exception& error) {
      LOG(ERROR) << "The ranks did not meet: " << error.what();
      state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
      global_gloo_context.Finalize();
      state.initialization_failed = true;
      return;
    }
""",
        )
        for call in (
            "global_gloo_context.Initialize(ParseGlooIface())",
            "state.process_set_table.Initialize(global_gloo_context)",
        )
    ),
    Patch(
        "horovod/common/operations.cc",
        r"(    // Reset initialization flag\n)",
        r"\1    horovod_global.initialization_failed = false;" + "\n",
    ),
    Patch(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        r"(  for \(auto& op : tx_\) \{\n)(    if \(op\.buf != nullptr\) \{\n      op\.buf->signalException)",
        r"""\1    if (op.getOpcode() == Op::SEND_UNBOUND_BUFFER) {
      NonOwningPtr<UnboundBuffer> unbound(op.ubuf);
      if (unbound) {
        unbound->signalException(ex);
      }
    }
\2""",
    ),
)


class BuildError(RuntimeError):
    """Horovod cannot be built here. The message says what is missing, or has the compiler's output."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-install", action="store_true", help="only build the wheel, and print its path")
    options = parser.parse_args(arguments)
    try:
        wheel = cached_wheel() or build()
        print(f"Horovod {VERSION} for torch {metadata.version('torch')}: {wheel}", flush=True)
        if not options.no_install:
            install(wheel)
    except BuildError as error:
        print(f"Horovod was not built: {error}", file=sys.stderr)
        return 1
    return 0


def cache_folder() -> Path:
    """Return the cache folder of this torch, Python, platform and recipe, because a wheel fits only these."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise BuildError("torch is not installed, and Horovod is compiled against it: install torch first") from error
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(BUILD_VARIABLES))
    recipe = hashlib.sha256(repr((PATCHES, SETTINGS, *variables)).encode()).hexdigest()[:8]
    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "raysgd" / f"horovod-{VERSION}-torch-{torch}-{python}-{sysconfig.get_platform()}-{recipe}"


def cached_wheel() -> Path | None:
    return next(iter(sorted(cache_folder().glob("*.whl"))), None)


def missing() -> list[str]:
    """Return what a build needs and this machine lacks, each with a way to install it."""
    path = _environment()["PATH"]
    lacking = []
    if shutil.which("cmake", path=path) is None:
        lacking.append("cmake 3.13 or newer (pip install cmake, or your system's package)")
    if not any(shutil.which(name, path=path) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        lacking.append("a C++ compiler with C++20 (g++ 10 or newer, from your system's packages)")
    if not any(shutil.which(name, path=path) for name in ("make", "gmake")):
        lacking.append("make (from your system's packages)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking.append("Python's headers (your system's package python3-dev)")
    packages = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if packages:
        lacking.append(f"the Python packages {', '.join(packages)} (pip install 'raysgd[horovod]')")
    return lacking


def build() -> Path:
    """Download, patch and compile. The wheel appears in the cache only when it is complete."""
    lacking = missing()
    if lacking:
        raise BuildError("these are missing: " + "; ".join(lacking))
    folder = cache_folder()
    print(f"Building Horovod {VERSION} from source (minutes, once; kept in {folder})", flush=True)
    with tempfile.TemporaryDirectory(prefix="raysgd-horovod-") as scratch:
        source = download(Path(scratch))
        apply_patches(source)
        _run("pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", scratch, str(source))
        made = next(Path(scratch).glob("*.whl"))
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{made.name}.{os.getpid()}"
        shutil.copyfile(made, partial)
        os.replace(partial, folder / made.name)
    return folder / made.name


def download(scratch: Path) -> Path:
    """Return the folder of the released sources, unpacked."""
    _run(
        *("pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
        *("--dest", str(scratch), f"horovod=={VERSION}"),
    )
    with tarfile.open(scratch / f"horovod-{VERSION}.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(scratch, filter="data")
        else:
            archive.extractall(scratch)
    return scratch / f"horovod-{VERSION}"


def apply_patches(source: Path) -> None:
    for patch in PATCHES:
        file = source / patch.file
        text, found = re.subn(patch.old, patch.new, file.read_text(encoding="utf-8"))
        if found != 1:
            raise BuildError(
                f"cannot patch {patch.file} of Horovod {VERSION}: the pattern {patch.old!r} must occur once, and was found "
                f"{found} times"
            )
        file.write_text(text, encoding="utf-8")


def install(wheel: Path) -> None:
    _run("pip", "install", "--no-deps", "--force-reinstall", str(wheel))
    _run("-c", "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1; hvd.shutdown()")


def _run(*arguments: str) -> None:
    module = () if arguments[0] == "-c" else ("-m",)
    done = subprocess.run(
        [sys.executable, *module, *arguments],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        command = " ".join(("python", *module, *arguments))
        raise BuildError(f"`{command}` failed. The end of its output:\n{done.stdout[-6000:]}")


def _environment() -> dict[str, str]:
    """Return the environment for commands. This interpreter's scripts come first in PATH, for a cmake from pip."""
    path = os.pathsep.join(filter(None, [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    jobs = f"-j{os.cpu_count() or 1}"
    return {"MAKEFLAGS": jobs, **os.environ, **SETTINGS, "PATH": path}


if __name__ == "__main__":
    sys.exit(main())
