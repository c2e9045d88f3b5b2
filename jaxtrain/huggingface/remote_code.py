"""PyTorch modules of drafts, for folders whose config.json names them in `auto_map`."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "assets" / "remote_code"


def write_modules(config: Mapping[str, Any], folder: Path) -> None:
    """Write the modules of this package that a config.json names. Code of other folders is neither
    run nor passed on."""
    named = config.get("auto_map")
    sources = {file.name.removesuffix(".py.txt"): file for file in FOLDER.glob("*.py.txt")}
    for place in named.values() if isinstance(named, Mapping) else ():
        module, _, name = place.partition(".") if isinstance(place, str) else ("", "", "")
        source = sources.get(module)
        if source is not None and f"\nclass {name}(" in source.read_text(encoding="utf-8"):
            shutil.copyfile(source, folder / source.stem)
