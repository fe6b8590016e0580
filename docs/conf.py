"""The documentation site: Markdown by myst-parser, the look of furo, the reference of public names by autodoc."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "datapipe + trainer"
copyright = "the authors of datapipe + trainer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
parts = ("encoders", "faults", "sharedfs", "stage-nodes", "stage-scale")  # of other pages
exclude_patterns = ["_build", *(f"reference/{name}.md" for name in parts)]
html_theme = "furo"
html_title = "datapipe + trainer"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
smartquotes = False  # headings have code in them
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3  # so that page.md#a-heading is a link, and a wrong one is an error

default_role = "code"  # docstrings have `names` between single backticks
autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 80
autoclass_content = "both"  # also what __init__ takes
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False
add_module_names = False
napoleon_numpy_docstring = False
# Types in signatures that the reference does not describe: other projects', and our own that nobody has to make. Any
# other name that leads nowhere is an error, as is a wrong link between pages.
_OTHERS = "collections contextlib numpy pathlib torch nn types typing".replace(" ", "|")
_OURS = (
    r"trainer\.kfac\..*|datapipe\.images\.codec\.ImageHeader|datapipe\.loaders\.base\.DataDescription"
    r"|datapipe\.sampling\.(augment\.Crops|order\.KeyedPermutation)"
)
nitpick_ignore_regex = [("py:.*", rf"({_OTHERS})\..*|{_OURS}|[ag]_factor")]


class DarkTwins(SphinxTransform):
    """Show `name-light.svg` on light pages, and in its place `name-dark.svg` on dark ones."""

    default_priority = 100  # before Sphinx collects and copies images

    def apply(self, **kwargs: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].endswith("-light.svg"):
                twin = image.copy()
                twin["uri"] = image["uri"].replace("-light.svg", "-dark.svg")
                image["classes"] = [*image["classes"], "only-light"]
                twin["classes"] = [*twin["classes"], "only-dark"]
                image.parent.insert(image.parent.index(image) + 1, twin)


def _visit_math(writer, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _visit_display_math(writer, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="equation">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def _plain_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Read docstrings as they are meant: with `code`, and with |x| for an absolute value.

    Modules' own docstrings are left out: they are for readers of the code.
    """
    parts = [] if what == "module" else "\n".join(lines).split("`")
    for i, part in enumerate(parts):
        if i % 2 == 0:  # not code: what stands beside code, unless it is blank or punctuation, needs an escaped blank
            part = re.sub(r"\A(?=[^\s'\")\]}>/\\:.,;!?-])", r"\\ ", part) if i else part
            part = re.sub(r"(?<=[^\s'\"(\[{<:/-])\Z", r"\\ ", part) if i + 1 < len(parts) else part
            parts[i] = part.replace("|", r"\|")
    lines[:] = "`".join(parts).splitlines()


def setup(app: Sphinx) -> None:
    """Equations become MathML, which browsers draw themselves: the site loads nothing from elsewhere."""
    app.connect("autodoc-process-docstring", _plain_docstring)
    app.add_transform(DarkTwins)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_display_math, None))


html_math_renderer = "mathml"
