"""Make what `make gpu` needs on a machine without a network that has torch, but not Ray: `python -m tools.gpu.carry`.

One archive, `.gpu/site.zip`, holds the pinned Ray without the parts that no trainer uses, and the packages that Ray
needs and few machines have. All else that Ray needs is installed where torch and pandas are. `run.py` unpacks
it into `.gpu/site` there, if Ray is missing. No pip: its list of files does not fit any more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / ".gpu" / "site.zip"
PACKAGES = ("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")
LEFT_OUT = re.compile(r"ray/(?:jars|rllib|cpp|dashboard/client)/")
SYSTEMS = ("2_28", "2_27", "2_17", "2014", "1")  # pip matches each exactly


def download(python: str, folder: Path) -> list[Path]:
    """Download the packages' wheels for this version of Python on Linux, in the pinned versions."""
    platforms = [f"--platform=manylinux{'_' if '_' in each else ''}{each}_x86_64" for each in SYSTEMS]
    chosen = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    pinned = ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *chosen, *pinned, *PACKAGES], check=True)
    return sorted(folder.glob("*.whl"))


def pack(wheels: list[Path], archive: Path) -> None:
    """Pack the files of the wheels into one archive, without those that are left out."""
    archive.parent.mkdir(exist_ok=True)
    draft = archive.with_suffix(".part")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as into:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as given:
                for entry in given.infolist():
                    if not LEFT_OUT.match(entry.filename):
                        into.writestr(entry, given.read(entry), zipfile.ZIP_DEFLATED, 9)
    draft.replace(archive)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder. Programs can be executed again: `zipfile` does not see to that."""
    with zipfile.ZipFile(archive) as given:
        given.extractall(folder)
        for entry in given.infolist():
            if entry.external_attr >> 16 & 0o100:
                (folder / entry.filename).chmod(0o755)


def search_path() -> str:
    """Return a PYTHONPATH with which this repository and Ray can be imported. Unpack Ray if it is not installed."""
    found: list[str] = []
    if importlib.util.find_spec("ray") is None and ARCHIVE.exists():
        found = [str(ARCHIVE.with_suffix(""))]
        unpack(ARCHIVE, Path(found[0]))
    elif importlib.util.find_spec("ray") is None:
        print(
            f"Ray is not installed, and there is no {ARCHIVE}: phases with several workers will fail (make gpu-wheels)"
        )
    return os.pathsep.join([str(ROOT), *found, *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="the version of Python of that machine")
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels = download(args.python, Path(folder))
        pack(wheels, args.archive)
        for wheel in wheels:
            print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    print(f"{args.archive}: {args.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
