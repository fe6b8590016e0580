"""Recipes: what a run is to do, read from TOML, checked, and explained where it is wrong."""

from pathlib import Path

from datapipe.checks import did_you_mean
from datapipe.errors import SettingError

_FOLDER = Path(__file__).parents[1] / "recipes"


def built_in() -> dict[str, Path]:
    """Return the recipes that come with the package, ordered by name: name -> TOML file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"), key=lambda path: path.stem)}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: Name of a built-in recipe, or path of a .toml file.

    Returns:
        The path, of a file that exists.

    Raises:
        SettingError: There is no such recipe.
    """
    path = built_in().get(name, Path(name))
    if path.is_file():
        return path
    hint = did_you_mean(name, built_in())
    raise SettingError(f"recipe {name!r} is not a file, and not built in; built in: {', '.join(built_in())}{hint}")
