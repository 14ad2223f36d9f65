"""Executes notebooks in fresh kernels, and stores their outputs: `python tools/execute_notebooks.py NOTEBOOK...`.

With `--into FOLDER`, the results are written there, and the notebooks stay as they are. Stored outputs are what a reader
learns from: logs (stderr), timings of cells and the memory addresses of figures are left out.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

LIMIT_S = 600  # for one cell
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def executed(path: Path) -> Any:
    """Run all cells in a folder of their own, and return the notebook with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        # Neither the history of IPython nor the kernel's connection file goes into the home folder.
        os.environ |= {"IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": f"{folder}/jupyter"}
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # for `!raysgd`
        work = Path(folder) / "work"
        work.mkdir()
        resources = {"metadata": {"path": work}}
        NotebookClient(notebook, timeout=LIMIT_S, resources=resources, coalesce_streams=True).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Return the notebook without what differs from run to run, and from machine to machine."""
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        cell.outputs = [each for each in cell.outputs if each.get("data", {}).get("text/html") != ""]  # an empty table
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data = {"image/png": output.data["image/png"]}
    return notebook


def main() -> None:
    import nbformat

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="the folder for the results (default: the notebooks' own)")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    for path in arguments.notebooks:
        result = cleaned(executed(path))
        nbformat.validate(result)
        nbformat.write(result, (arguments.into or path.parent) / path.name)
        print(f"executed {path.name}", flush=True)


if __name__ == "__main__":
    main()
