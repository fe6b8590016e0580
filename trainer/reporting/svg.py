"""SVG of matplotlib's as a part of the report's page, in the page's colours, light or dark."""

from __future__ import annotations

import re
from xml.etree import ElementTree

LIGHT = {  # after Okabe and Ito (2008), whose hues colour-blind readers tell apart
    "c0": "#0072b2",
    "c1": "#c24e00",
    "c2": "#00855f",
    "c3": "#a8467f",
    "c4": "#d99a00",
    "c5": "#6b7683",
    "c6": "#7a5a2f",
    "c7": "#5648a8",
    "c8": "#b3261e",
    "ink": "#1c2126",
    "muted": "#59636e",
    "line": "#dde1e6",
    "paper": "#ffffff",
}
DARK = {
    "c0": "#5ab4ee",
    "c1": "#f58a4b",
    "c2": "#3cc79a",
    "c3": "#e08fbd",
    "c4": "#ffd166",
    "c5": "#98a3af",
    "c6": "#cfa56b",
    "c7": "#aca2f5",
    "c8": "#ff8f85",
    "ink": "#e4e8ec",
    "muted": "#a0aab4",
    "line": "#363d45",
    "paper": "#15191d",
}


def svg_for_page(svg: bytes, title: str) -> str:
    """Return matplotlib's SVG as an element of an HTML page: without namespaces, in the page's colours."""
    root = ElementTree.fromstring(svg)
    values = [value for element in root.iter() for value in element.attrib.values()]
    references = {name for value in values for name in re.findall(r"#(\w+)", value)}
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): _use_variables(value) for name, value in element.attrib.items()}
        if attributes.get("id") not in references:
            attributes.pop("id", None)
        element.attrib.clear()
        element.attrib.update(attributes)
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    root.attrib |= {"role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _use_variables(value: str) -> str:
    """Write the page's variables in place of colours."""
    for name, colour in LIGHT.items():
        value = value.replace(colour, f"var(--{name})")
    return value
