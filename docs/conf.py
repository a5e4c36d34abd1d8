"""The site: `make docs` builds it into build/site with Sphinx. A warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import farprop

sys.path.insert(0, str(Path(__file__).parent))

project = "Farprop"
author = "The Farprop authors"
copyright = author
version = release = farprop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_extension"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
highlight_language = "none"  # most blocks without a language are output of commands

# The pages below each page, in order. A page of docs/ itself that is not named here comes under guides/index, one of
# docs/examples under examples/index.
navigation = {
    "index": [
        "tutorial/index",
        "examples/index",
        "howto/index",
        "guides/index",
        "reference/index",
        "explanation/index",
        "project/index",
    ],
    "tutorial/index": [f"tutorial/step{number}" for number in range(1, 7)],
    "howto/index": [
        "howto/migrate",
        "howto/deploy",
        "howto/secure",
        "howto/hangs",
        "howto/failures",
        "profiling",
        "howto/tune",
        "howto/process_group",
        "howto/transport",
    ],
    "howto/deploy": ["launch", "init_rpc", "notebooks", "slurm", "mpi", "kubernetes", "ray", "doctor"],
    "howto/secure": ["restricted"],
    "howto/hangs": ["inspect", "dashboard", "telemetry"],
    "guides/index": [
        "calls",
        "asyncio",
        "streaming",
        "one_to_many",
        "typing",
        "modules",
        "autograd",
        "optim",
        "pipeline",
        "groups",
        "ddp",
        "devices",
        "jit",
        "compat",
    ],
    "reference/index": [
        "reference/rpc",
        "reference/autograd",
        "reference/nn",
        "reference/optim",
        "reference/distributed",
        "reference/launch",
        "reference/jit",
        "reference/inspect",
        "reference/profiler",
        "reference/dashboard",
        "reference/telemetry",
        "reference/errors",
        "errors",
        "settings",
        "reference/testing",
        "reference/compat",
    ],
    "explanation/index": [
        "explanation/map",
        "explanation/call",
        "explanation/backward",
        "references",
        "reliability",
        "security",
        "explanation/performance",
        "benchmarks",
        "clients",
        "architecture",
        "design",
        "glossary",
    ],
    "project/index": [
        "project/versions",
        "torch_versions",
        "project/readme",
        "project/changelog",
        "project/contributing",
        "project/security",
        "project/conduct",
    ],
}

# Markdown as GitHub reads it, so that the pages can be read there as well.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc_member_order = "bysource"  # of a module: as in __all__
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["ray"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False

html_theme = "furo"
pygments_dark_style = "monokai"
html_title = "Farprop"
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_favicon = "assets/logo.svg"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo.svg",
    "source_repository": "https://github.com/farprop/farprop",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
    "light_css_variables": {"color-brand-primary": "#1b5fa8", "color-brand-content": "#1b5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db8f0", "color-brand-content": "#7db8f0"},
}
