"""Recipes: what a run is to do, read from TOML, checked, and explained where it is wrong."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"


def built_in() -> dict[str, Path]:
    """Return the recipes that come with the package, ordered by name: name -> TOML file."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda path: path.stem)}
