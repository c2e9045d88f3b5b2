"""Write the generated pages of docs/: reference, command_line.md, from_*.md, schema.json.

python scripts/make_reference.py          # writes them
python scripts/make_reference.py --check  # names those that are old; 1 where there are any
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]


def render_pages() -> dict[str, str]:
    """{name in docs/: text}."""
    from api_page import render_api
    from migration_pages import render_migration

    from jaxtrain.cli.reference import render_commands
    from jaxtrain.config import docs
    from jaxtrain.config.schema import render_schema

    return {
        **{f"reference/{name}": text for name, text in docs.render_pages().items()},
        "reference/api.md": render_api(),
        "command_line.md": render_commands(),
        "schema.json": render_schema(),
        **render_migration(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    docs = ROOT / "docs"
    old = {
        name: text
        for name, text in render_pages().items()
        if not (docs / name).exists() or (docs / name).read_text() != text
    }
    for name, text in old.items():
        print(f"docs/{name} is old" if check else f"docs/{name}")
        if not check:
            (docs / name).parent.mkdir(exist_ok=True)
            (docs / name).write_text(text)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
