"""How Sphinx builds these pages: Markdown through MyST, the API from docstrings, nothing from the network."""

import re
import sys
from pathlib import Path
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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"raysgd {__version__}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["code.css"]

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # a framework's docstrings are not written for these pages
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Not part of the environment that builds these pages.
autodoc_mock_imports = ["horovod", "tensorflow"]


def plain_text(lines: list[str]) -> list[str]:
    """Docstrings here are plain text: prose, `names`, "- " lists, indented code. Say so in reST."""
    out: list[str] = []
    in_code = in_list = False
    for line in lines:
        indented = line.startswith("    ")
        if line.strip() and in_code != (indented and not in_list):
            in_code = not in_code
            out += ["", "::", ""] if in_code else [""]
        if not in_code:
            starts_item = line.startswith("- ")
            if starts_item and not in_list:
                out.append("")
            in_list = starts_item or (in_list and line.startswith("  "))
            line = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", line)
            line = re.sub(r"(?<![\w`])\*+(?=\w)", lambda stars: r"\*" * len(stars[0]), line)  # *args
        out.append(line)
    return out


def on_docstring(app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = plain_text(lines)


def setup(app: "Sphinx") -> None:
    app.connect("autodoc-process-docstring", on_docstring)
