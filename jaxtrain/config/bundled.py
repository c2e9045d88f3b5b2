"""The configs that come with jaxtrain: found by name, wherever it is installed.

In a checkout they are the folder `configs/`; a wheel holds a copy of it inside the package
(setup.py).
"""

import os
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

_PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Return the folder of the configs."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def list_recipes() -> dict[str, Path]:
    """Name -> file: "quickstart", "tree_ablation/tree"."""
    folder = recipes_folder()
    files = sorted(folder.glob("**/*.toml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def find_config(name: str | Path) -> Path:
    """The file that --config names: a path, or the name of a config that comes with jaxtrain.

    A file that is there comes first. Raises UserError for a word that is neither.
    """
    path = Path(name)
    if os.path.isfile(path):  # False for a name that is too long, too
        return path
    recipes = list_recipes()
    if str(name) not in recipes:
        if path.suffix:
            return path
        raise UserError(
            f"there is no config file {show(str(name))}, and no config of this name comes with"
            f" jaxtrain; it brings {', '.join(recipes) or 'none'}; a file ends in .toml, .yaml,"
            " .yml or .json"
        )
    return recipes[str(name)]
