"""Try a release, without publishing anything: `make release`.

Checks the version, the changelog and the working tree; builds the wheel and the source archive of the last commit in
build/release; and runs the wheel's tests, the README's example among them, in a folder without this repository. At the end it
prints the commands that publish, or what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "release"


def missing(version: str, changelog: str, tags: str, status: str) -> Iterator[str]:
    """Yield what has to be done before this version can be published."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        yield f"raysgd/version.py: {version!r} is not a version such as 1.2.3 or 1.2.3rc1"
    heading = re.search(r"(?m)^## (\S+) \((.*)\)$", changelog)
    if heading is None or heading[1] != version:
        yield f"CHANGELOG.md: the first heading is not '## {version} (DATE)'"
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2]):
        yield f"CHANGELOG.md: {version} has no date, but ({heading[2]})"
    if f"v{version}" in tags.split():
        yield f"the tag v{version} exists: choose the next version"
    if status.strip():
        yield f"these changes are not committed, and so not in the release:\n{status.rstrip()}"


def output(*command: str, cwd: Path = ROOT) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def build(tree: Path) -> Path:
    """Build both archives of the last commit in `tree`, and return the wheel in OUT."""
    archive = tree / "commit.tar"
    output("git", "archive", "--output", str(archive), "HEAD")
    shutil.unpack_archive(archive, tree / "raysgd", filter="data")
    shutil.rmtree(OUT, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
    ]
    output(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(OUT), cwd=tree / "raysgd")
    output(*pip, "--no-index", "--quiet", "--wheel-dir", str(OUT), cwd=tree / "raysgd")
    (wheel,) = OUT.glob("*.whl")
    return wheel


def main() -> int:
    text = (ROOT / "raysgd" / "version.py").read_text(encoding="utf-8")
    version = re.findall(r'(?m)^__version__ = "(.*)"$', text)[0]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    left = list(missing(version, changelog, output("git", "tag"), output("git", "status", "--porcelain")))
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
    print("\n".join(f"built {path.relative_to(ROOT)}, {path.stat().st_size:,} bytes" for path in sorted(OUT.iterdir())))
    environment = {**os.environ, "RAYSGD_WHEEL": str(wheel), "RAYSGD_TIER": "nightly"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/package/test_wheel.py"]
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        left.append("the tests of the wheel fail")
    if left:
        print("\n".join(["Not ready:", *(f"- {each}" for each in left)]))
        return 1
    print(f"Ready. Nothing was published; these commands do:\n  git tag v{version} && git push origin v{version}")
    print(f"  twine upload {OUT.relative_to(ROOT)}/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
