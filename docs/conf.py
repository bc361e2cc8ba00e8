"""The site: Sphinx reads Markdown (MyST), takes the reference from docstrings, and furo draws it."""

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

_umbrella = tomllib.loads((ROOT / "packages" / "drivetrain" / "pyproject.toml").read_text())["project"]
_repository = _umbrella.get("urls", {}).get("Repository")  # without an address there is no link

project = "drivetrain"
author = "the drivetrain authors"
copyright = author
release = version = _umbrella["version"]
html_theme = "furo"
html_title = f"drivetrain {version}"
html_static_path = ["_static"]
html_css_files = ["drivetrain.css"]
html_favicon = "_static/logo-light.svg"
html_theme_options = {
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
    "footer_icons": [{"name": "Repository", "url": _repository, "html": "Repository", "class": ""}]
    if _repository
    else [],
}
extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]  # the cards of the front page
myst_heading_anchors = 4
# The heading of a package's name comes with its docstring between; a page may step from # to ###.
suppress_warnings = ["myst.header"]

smartquotes_action = "qe"  # not D, which makes a dash of the two hyphens of a flag
default_role = "code"  # docstrings write `name`, as Markdown does
toc_object_entries = False  # every page would copy the list of every method of the reference
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a compact list of fields, beside the signature that shows their types


def write_pages(_app: Sphinx) -> None:
    """Write the reference before Sphinx looks for pages."""
    from reference import write_reference

    write_reference(ROOT)


def setup(app: Sphinx) -> None:
    """Called by Sphinx once."""
    app.connect("builder-inited", write_pages)
