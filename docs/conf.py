"""Sphinx configuration of funcol's documentation; ``tools/docs`` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import funcol

project = "funcol"
author = "The funcol authors"
copyright = "The funcol authors"  # noqa: A001
version = release = funcol.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "stub_classes",
]
source_suffix = {".md": "markdown"}
nitpicky = True
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False

# Names of PyTorch and of the standard library, whose documentation is elsewhere; and names without a page.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|typing|pathlib|datetime|types|contextlib|functools|io)\..*"),
    (r"py:.*", r"(Any|Callable|Sequence|Mapping|Iterable|Iterator|Path|TextIO|timedelta|Self)"),
    (r"py:.*", r"(Tensor|DTensor|DTensorSpec|DeviceMesh|Placement|ReduceOp|OpOverload|OpSchema|OpStrategy)"),
    (r"py:.*", r"(OutputSharding|RuntimeSchemaInfo|OpInfo|TensorMeta|ProcessGroup|StockPropagator)"),
    (r"py:.*", r"funcol\.(_C\.Transfer|collectives\.in_flight\._File)"),
    (r"py:.*", r"(RankTypes|PlacementsLike|ShardOrderLike|MeshLike|CostModel|Row|SingleAxisRule|Applied)"),
]

html_theme = "pydata_sphinx_theme"
html_title = "funcol"
html_favicon = "style/logo.svg"
html_static_path = ["style"]
templates_path = ["templates"]
html_css_files = ["funcol.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "funcol", "image_light": "style/logo.svg", "image_dark": "style/logo.svg"},
    "navbar_start": ["navbar-logo", "version"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 2,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "start": [], "performance": []}
