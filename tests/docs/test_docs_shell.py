"""Shell blocks of the tutorials and how-to pages: each has a tag, and its commands run.

{test}: as it stands. {short KEY=VALUE ... --OPTION=VALUE ...}: its trainings with these overrides
and its other verbs with these options, which make them short; as it stands by hand:

    python -m pytest tests/docs/test_docs_shell.py -m by_hand

{network}: never run, because it downloads a model or rows, or installs a package. By hand, what a
page says below a block is compared, too: `<!-- prints: loss {0.1..0.2} -->` is a line of the output
with numbers in these ranges; {..} stands for any text.
"""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.docs.blocks import ROOT, Block, list_blocks, list_commands

FOLDERS = ("docs/tutorials/", "docs/how_to/")
TAG = re.compile(r"\{(test|network|short(?: \S+=\S+)+)\}")
FIRST = ("docs/tutorials/first_run.md", "docs/tutorials/own_chats.md")
"""Pages whose runs the others read."""
LONG = [f"docs/tutorials/{name}.md" for name in ("grpo", "preferences", "trees", "draft_model")]
"""Pages that take minutes even if they are short."""

RUN_ALL = """
import json, sys
from jaxtrain.main import main

for words in json.load(sys.stdin):
    print(f"$ jaxtrain {' '.join(words)}", flush=True)
    try:
        code = main(words) or 0
    except SystemExit as end:
        code = end.code or 0
    if code and words != ["doctor"]:
        sys.exit(f"exit code {code}")
"""
"""Commands in one process, which imports jax once."""


def list_shell() -> list[Block]:
    """Blocks of the two folders with commands of ours, those of FIRST before the others."""
    blocks = [
        block
        for block in list_blocks()
        if block.page.startswith(FOLDERS) and any(list_commands(block))
    ]
    place = {page: number for number, page in enumerate(FIRST)}
    return sorted(blocks, key=lambda block: place.get(block.page, len(place)))


BLOCKS = list_shell()
LOCAL = [block for block in BLOCKS if "{network}" not in block.tags]


def write_files(folder, pages: set[str]) -> None:
    """Write the files whose names are the first lines of blocks, and run those of Python."""
    (folder / "configs").symlink_to(ROOT / "configs")
    for block in list_blocks():
        name = re.match(r"\s*# (\w+\.(?:py|toml))\n", block.text)
        if block.page in pages and name:
            (folder / name[1]).write_text(textwrap.dedent(block.text))
            if name[1].endswith(".py"):
                subprocess.run([sys.executable, name[1]], cwd=folder, check=True)


def run_commands(folder, commands: list[list[str]]) -> str:
    """Run command lines in a folder, and return what they print."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}", JAX_PLATFORMS="cpu")
    flags = env.pop("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def shorten(block: Block) -> list[list[str]]:
    """Return the commands of a block as a test has time for."""
    tag = TAG.search(block.tags)[1]
    options = [word for word in tag.split()[1:] if word.startswith("--")]
    overrides = [word for word in tag.split()[1:] if word not in options]
    return [
        [*words, *(overrides if words[0].startswith("-") else options)]
        for words in list_commands(block)
    ]


def find_line(pattern: str, output: str) -> bool:
    """Return whether a line of the output has the text of `pattern`, its numbers in the ranges."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    ranges = [part.partition("..")[::2] for part in parts[1::2]]
    text = "".join(
        re.sub(r"\\ +", r"\\s+", re.escape(part))
        if number % 2 == 0
        else ("(.*?)" if part == ".." else r"(-?[\d.]+(?:e-?\d+)?)")
        for number, part in enumerate(parts)
    )
    return any(
        all(
            not low or float(low) <= float(value.rstrip(".")) <= float(high)
            for (low, high), value in zip(ranges, line.groups(), strict=True)
        )
        for line in re.finditer(text, output)
    )


def test_every_block_has_a_tag():
    untagged = [block.place for block in BLOCKS if not TAG.search(block.tags)]
    assert len(BLOCKS) > 15 and not untagged, f"tag as the docstring says: {untagged}"


def test_ranges_are_compared():
    output = "step 10/10  loss 5.9423\nheld-out loss: 6.26 -> 0.003022\n"
    assert find_line("held-out loss: {5..7} -> {0..0.02}", output)
    assert find_line("step 10/10 {..} loss {5.9..6}", output)
    assert not find_line("held-out loss: {5..7} -> {0..0.001}", output)
    assert not find_line("held-out reward: {5..7}", output)


def run_pages(tmp_path, pages) -> None:
    """Run the blocks of pages, short."""
    blocks = [block for block in LOCAL if block.page in pages]
    write_files(tmp_path, {block.page for block in blocks})
    run_commands(tmp_path, [words for block in blocks for words in shorten(block)])


@pytest.mark.slow  # two short runs and thirty commands on their models
def test_commands_run(tmp_path):
    run_pages(tmp_path, {block.page for block in LOCAL}.difference(LONG))


@pytest.mark.thorough
def test_commands_of_long_pages_run(tmp_path):
    run_pages(tmp_path, {FIRST[0], *LONG})


@pytest.mark.by_hand
def test_pages_print_what_they_say(tmp_path):
    write_files(tmp_path, {block.page for block in LOCAL})
    missing = []
    for block in LOCAL:
        output = run_commands(tmp_path, list(list_commands(block)))
        missing += [
            f"{block.place}: {line}" for line in block.prints if not find_line(line, output)
        ]
    assert not missing, "\n".join(missing)
