"""Links of all pages lead somewhere. Addresses of other sites are not asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.findall(text):
        link = "".join(match)
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {target.name} has no heading for #{anchor}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(("folder", "most"), [("tutorials", 120), ("how-to", 40), ("explanation", 120)])
def test_guides_are_short_and_begin_with_what_to_do(folder: str, most: int) -> None:
    """Code, or a picture, within the first ten lines."""
    guides = sorted((ROOT / "docs" / folder).glob("*.md"))
    assert guides
    for guide in guides:
        lines = guide.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= most, f"{guide.name} has {len(lines)} lines"
        assert any(line.startswith(("```", "![")) for line in lines[:10]), guide.name
