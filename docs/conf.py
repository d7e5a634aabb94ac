"""How `make docs` builds the site from this folder; pages that are files elsewhere are included."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tools`

import gomuon

project = "gomuon"
author = copyright = "The gomuon authors"
release = version = gomuon.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "tools.site.sphinx_extension",
]
exclude_patterns = [".*", "**/.ipynb_checkpoints"]
nitpicky = True  # a link that leads nowhere is a warning, and `make docs` makes warnings errors
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, which have no page here

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

# Notebooks are kept without outputs, and run here, so that outputs are those of this version.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have names and defaults; the text says what a value may be
default_role = "code"  # docstrings put code in single backticks

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"gomuon {version}"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
