"""Draw the pictures of docs/images that come from arrays and from benchmarks/results.

python scripts/draw_pictures.py [NAME ...]    # all without names
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
FOLDER = ROOT / "docs" / "images"


def main() -> None:
    import picture_idea
    import picture_results
    from picture_style import write_svg

    pictures = picture_idea.PICTURES | picture_results.PICTURES
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(pictures))
    for name in parser.parse_args().names or pictures:
        write_svg(pictures[name](), FOLDER / f"{name}.svg")
        print(f"docs/images/{name}.svg")


if __name__ == "__main__":
    main()
