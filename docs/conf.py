"""How Sphinx builds these pages: Markdown through MyST, the API from docstrings, nothing from the network."""

import ast
import inspect
import re
import shutil
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from raysgd.version import __version__  # noqa: E402

project = "raysgd"
author = "the raysgd authors"
copyright = author
version = release = __version__

# myst_nb reads Markdown as myst_parser does, and notebooks.
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
# Sphinx reads only what is below docs/.
shutil.copytree(
    ROOT / "examples" / "notebooks", ROOT / "docs" / "notebooks", dirs_exist_ok=True
)
nb_execution_mode = "off"  # the outputs are stored in the notebooks
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

smartquotes_action = "D"  # dashes only: most quotes here are part of code

html_theme = "furo"
html_title = f"raysgd {__version__}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["code.css"]

# api.md lists what is public; autosummary writes a page for each name, docs/api/NAME.rst, from _templates/. A page shows
# the methods of the class and of its bases in raysgd, unless they are named here.
SHOWN = {
    "raysgd.train.DataParallelTrainer": "fit restore can_restore setup get_dataset_config",
    "raysgd.train.TorchTrainer": "",
    "raysgd.train.TensorflowTrainer": "",
    "raysgd.train.HorovodTrainer": "",
    "raysgd.train.ScalingConfig": "policy bundles",
    "raysgd.train.Result": "from_path metrics_dataframe get_best_checkpoint",
    "raysgd.train.RunConfig": "",
    "raysgd.train.Checkpoint": "from_dict from_directory from_uri from_bytes to_dict to_directory as_directory to_uri to_bytes "
    "path get_metadata set_metadata update_metadata",
    "raysgd.train.TrainingIterator": "",
    "raysgd.train.WorkerGroup": "execute execute_single execute_object shutdown",
    "raysgd.train.BackendExecutor": "start run shutdown",
    "raysgd.storage.locations.Uri": "",
    "raysgd.train.DataConfig": "",
    "raysgd.train.BackendConfig": "backend_cls",
    "raysgd.train.TorchConfig": "",
    "raysgd.train.TensorflowConfig": "",
    "raysgd.train.HorovodConfig": "",
    "raysgd.train.CheckpointConfig": "",
    "raysgd.train.CheckpointStrategy": "",
    "raysgd.train.TrainingCallback": "start_training process_results handle_result finish_training",
    "raysgd.train.callbacks.LoggerCallback": "log_trial_start log_trial_result log_trial_end",
    "raysgd.train.lightning.RayDDPStrategy": "",
    "raysgd.train.lightning.RayFSDPStrategy": "",
    "raysgd.train.lightning.RayDeepSpeedStrategy": "",
    "raysgd.train.lightning.RayLightningEnvironment": "",
    "raysgd.train.lightning.RayTrainReportCallback": "",
    "raysgd.TrainingOptions": "",
    "raysgd.CreatorOperator": "",
    "raysgd.callbacks.History": "rows of column to_dataframe plot",
    "raysgd.tune.BaseTorchTrainable": "trainer",
    "raysgd.tune.TFTrainable": "",
    "raysgd.data.RayData": "",
    "raysgd.data.SampleSeeds": "set_epoch",
}
PUBLIC = re.findall(
    r"(?m)^   (raysgd[.\w]+)$",
    (ROOT / "docs" / "api.md").read_text(encoding="utf-8"),
)
PUBLIC_LAST = [
    last for name in PUBLIC if (last := name.rpartition(".")[2])[0].isupper()
]  # the classes
CALLBACKS = "raysgd.callbacks."  # the hooks are described once, on the page of their base class


def shown_methods(name: str) -> str:
    """Return the options of the page of a public name, which say which methods it shows."""
    if name in SHOWN or (
        name.startswith(CALLBACKS) and name != f"{CALLBACKS}Callback"
    ):
        listed = ", ".join(SHOWN.get(name, "").split())
        return listed and f":members: {listed}"
    return ":members:\n   :inherited-members:"


autosummary_generate = True
autosummary_context = {
    "options": {name: shown_methods(name) for name in PUBLIC},
    "own_page": ", ".join(PUBLIC_LAST),
}

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = (
    False  # a framework's docstrings are not written for these pages
)
autodoc_typehints = "signature"
maximum_signature_line_length = 80
autodoc_preserve_defaults = True
# Not part of the environment that builds these pages.
autodoc_mock_imports = ["horovod", "keras", "tensorflow"]


# A row of a table of arguments: names, two spaces or more, text. Lines that continue the text are indented further.
ROW = re.compile(r" *(\*{0,2}\w+(?:, \w+)*) {2,}(\S.*)")
CONTINUED = " " * 6


def plain_text(lines: list[str], arguments: set[str]) -> list[str]:
    """Docstrings here are plain text: prose, `names`, "- " lists, indented code and tables of arguments. Say so in reST."""
    out: list[str] = []
    for kind, block in blocks(lines, arguments):
        if kind == "code":
            out += ["", f".. code-block:: {language_of(block)}", "", *block, ""]
        else:
            out += parameter_list(block) if kind == "arguments" else prose(block)
    return out


def blocks(lines: list[str], arguments: set[str]) -> list[tuple[str, list[str]]]:
    """Divide a docstring into prose, indented code, and tables of arguments; empty lines belong to the part before them."""
    found: list[tuple[str, list[str]]] = [("prose", [])]
    for line in lines:
        row = ROW.fullmatch(line)
        if row and set(row[1].split(", ")) <= arguments:
            kind = "arguments"
        elif not line.strip() or (
            found[-1][0] == "arguments" and line.startswith(CONTINUED)
        ):
            kind = found[-1][0]
        else:
            kind = "code" if line.startswith("    ") else "prose"
        if kind != found[-1][0]:
            found.append((kind, []))
        found[-1][1].append(line)
    return found


def language_of(block: list[str]) -> str:
    try:
        ast.parse(dedent("\n".join(block)))
    except SyntaxError:
        return "text"
    return "python"


def prose(block: list[str]) -> list[str]:
    out: list[str] = []
    in_list = False
    for line in block:
        if line.startswith("- ") and not in_list:
            out.append("")
        in_list = line.startswith("- ") or (in_list and line.startswith("  "))
        out.append(marked(line))
    return out


def marked(line: str) -> str:
    line = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", line)
    return re.sub(
        r"(?<![\w`])\*+(?=\w)", lambda stars: r"\*" * len(stars[0]), line
    )  # *args


def parameter_list(block: list[str]) -> list[str]:
    out = [""]
    for line in filter(str.strip, block):
        row = None if line.startswith(CONTINUED) else ROW.fullmatch(line)
        out.append(
            f":param {row[1]}: {marked(row[2])}"
            if row
            else f"    {marked(line.strip())}"
        )
    return [*out, ""]


def parameters(obj: Any) -> set[str]:
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def on_docstring(
    app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    if what == "module":  # which ends with where it runs
        lines[:] = [
            re.sub(r"(^| )(Driver|Worker|Both)\.$", "", line) for line in lines
        ]
    lines[:] = plain_text(lines, parameters(obj))


def on_source(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Let links to notebooks, which lead to the files on GitHub, lead to their pages here. docs/notebooks is a copy of their folder."""
    link = r"\[([^][]+)\]\((\.\./examples/notebooks/)?(\w+)\.ipynb\)"
    source[0] = re.sub(link, r"{doc}`\1 </notebooks/\3>`", source[0])


def setup(app: "Sphinx") -> None:
    app.connect("source-read", on_source)
    app.connect("autodoc-process-docstring", on_docstring)
