"""How Sphinx builds this documentation: `make docs`, warnings are errors."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from gluon_amp import __version__ as release  # before the extensions import MXNet

project = "gluon_amp"
copyright = "the gluon_amp authors"
extensions = [
    "myst_parser",
    "docstring_references",
    "operator_tables",
    "gain_picture",
    "viewer_pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_ext"]

# Everything that a page needs is copied into the build: no fonts, scripts or styles from the network.
html_theme = "furo"
html_title = f"gluon_amp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["operator_filter.js"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "fieldlist"]

# Docstrings give types; annotations repeat them at more length.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_ivar = True

# References to this package must resolve. Those to MXNet, NumPy and Python have no page to lead to.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r".*"),
    ("py:exc", r"(Attribute|Index|Key|OS|Runtime|Type|Value)Error|FileNotFoundError"),
]
