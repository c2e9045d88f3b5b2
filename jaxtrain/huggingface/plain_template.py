"""Render every beginning of a conversation at once, for chat templates that write message by
message.

Most templates are one loop over the messages with something before and behind it:

    before                          what is behind reads no single message
    {% for message in messages %}   its body sees messages[0] and one neighbor on each side,
    ...                             and leaves nothing behind for the next turn
    {% endfor %}
    behind

Of these, the first k messages alone render as: before, the bodies of the first k - 1, that of the
last (whose loop.last is true and which has no next message), behind. So the template is rewritten
into a program that writes, for each message, its body both ways and what would be behind it, with
marks between. The syntax tree decides whether a template qualifies; all others, such as those that
search for the last question or that count, yield None and are rendered anew for each k.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MARK, NOTHING = "jaxtrain_mark", "jaxtrain_nothing"
OF_LOOP = frozenset("first last index index0 previtem nextitem depth depth0".split())
STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock)
KEEPING = frozenset({"joiner", "cycler", "lipsum", MARK, NOTHING})
"""Names of stateful helpers, and those of the marked program."""
WAYS = 4
"""Texts of each message."""


@dataclass(frozen=True)
class Prefixes:
    """The renderings of the first k messages, for every k from 1 on."""

    bodies: tuple[str, ...]
    """The text before all messages, then that of each message before others."""
    lasts: tuple[str, ...]
    """The text of each message as the last one, with what is behind."""
    prompts: tuple[str, ...]
    """Like `lasts`, with the generation prompt."""

    @functools.cached_property
    def starts(self) -> list[int]:
        """Characters before each message."""
        return list(itertools.accumulate(len(body) for body in self.bodies))

    @property
    def text(self) -> str:
        """Rendering of all messages, without the generation prompt."""
        return "".join(self.bodies[:-1]) + self.lasts[-1]

    def render(self, count: int, generation: bool = False) -> str:
        """Return the rendering of the first `count` messages, at least 1."""
        ends = self.prompts if generation else self.lasts
        return "".join(self.bodies[:count]) + ends[count - 1]


def split_marked(text: str, mark: str, count: int) -> Prefixes | None:
    """Read what a marked program wrote; None if messages contain the mark or turns are missing."""
    before, *parts = text.split(mark)
    if len(parts) != WAYS * count:
        return None
    bodies, lasts, ends, prompts = (parts[way::WAYS] for way in range(WAYS))
    return Prefixes(
        (before, *bodies),
        tuple(last + end for last, end in zip(lasts, ends, strict=True)),
        tuple(last + prompt for last, prompt in zip(lasts, prompts, strict=True)),
    )


@functools.lru_cache(maxsize=64)
def mark_template(text: str) -> nodes.Template | None:
    """Build the marked program of a template; None unless the module's docstring describes it."""
    tree = parse(text)
    loops = [index for index, node in enumerate(tree.body) if _is_loop(node)]
    if len(loops) != 1:
        return None
    position = loops[0]
    loop: Any = tree.body[position]
    if not _is_plain(tree, loop, tree.body[position + 1 :]):
        return None
    # Each way from a tree of its own, for they are changed.
    last, behind, prompt = (parse(text).body[position:] for _ in range(3))
    ways = (
        [_Body(as_last=False).visit(node) for node in loop.body],
        [_Body(as_last=True).visit(node) for node in last[0].body],  # pyright: ignore
        [_Generation(False).visit(node) for node in behind[1:]],
        [_Generation(True).visit(node) for node in prompt[1:]],
    )
    loop.body = [
        node
        for way in ways
        for node in (nodes.Output([nodes.Name(MARK, "load")]), nodes.Scope(way))
    ]
    tree.body = tree.body[: position + 1]
    assert tree.environment is not None, "a parsed tree has one"
    tree.set_environment(tree.environment)
    return tree


def parse(text: str) -> nodes.Template:
    """Parse a template into its syntax tree."""
    from transformers.utils import chat_template_utils  # slow to import

    # The one place where transformers keeps its filters, functions and tags for templates.
    environment = chat_template_utils._compile_jinja_template("").environment
    return environment.parse(text)


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.For) and _is_messages(node.iter)


def _is_plain(tree: nodes.Template, loop: nodes.For, behind: list[nodes.Node]) -> bool:
    """Return whether the module's docstring describes the template."""
    if loop.recursive or loop.else_ or loop.test or not isinstance(loop.target, nodes.Name):
        return False
    for node in (*loop.body, *behind):
        for statement in (node, *node.find_all(nodes.Stmt)):
            if not isinstance(statement, STATEMENTS):
                return False
        if any(True for _ in node.find_all((nodes.NSRef, nodes.Break, nodes.Continue))):
            return False
    fine = {id(loop.iter)}
    fine |= {id(n.node) for n in tree.find_all(nodes.Getitem) if _is_const(n.arg, 0)}
    inner = [statement for node in loop.body for statement in _outside_loops(node)]
    for node in inner:
        if isinstance(node, nodes.Getattr) and node.attr in OF_LOOP:
            fine.add(id(node.node))
        if isinstance(node, nodes.Getitem) and _neighbor(node.arg):
            fine.add(id(node.node))
    body_nodes = {id(node) for node in inner}
    flags = {id(n) for node in behind for n in (node, *node.find_all(nodes.Name))}
    for name in tree.find_all(nodes.Name):
        if name.name in KEEPING:
            return False
        if name.name == "messages" and (id(name) not in fine or name.ctx != "load"):
            return False
        if name.name == "loop" and id(name) in body_nodes and id(name) not in fine:
            return False
        if name.name == "add_generation_prompt" and (id(name) not in flags or name.ctx != "load"):
            return False
        if id(name) in flags and name.name in ("loop", loop.target.name):
            return False
    return True


def _outside_loops(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield a node and its descendants, except bodies of loops, which have a `loop` of their
    own."""
    yield node
    children = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
    for child in children:
        yield from _outside_loops(child)


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages"


def _is_const(node: nodes.Node, value: int) -> bool:
    return isinstance(node, nodes.Const) and type(node.value) is int and node.value == value


def _neighbor(node: nodes.Node) -> int:
    """Return 1 for loop.index0 + 1, -1 for loop.index0 - 1, else 0."""
    if isinstance(node, nodes.Add | nodes.Sub) and _is_const(node.right, 1):
        operand = node.left
        if isinstance(operand, nodes.Getattr) and operand.attr == "index0":
            if isinstance(operand.node, nodes.Name) and operand.node.name == "loop":
                return 1 if isinstance(node, nodes.Add) else -1
    return 0


class _Body(NodeTransformer):
    """The loop's body, for a message before others or for the last one."""

    def __init__(self, *, as_last: bool):
        self.as_last = as_last

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = self.visit(node.iter)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        of_loop = isinstance(node.node, nodes.Name) and node.node.name == "loop"
        if self.as_last and of_loop and node.attr == "last":
            return nodes.Const(True)
        if self.as_last and of_loop and node.attr == "nextitem":
            return nodes.Name(NOTHING, "load")
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        side = _neighbor(node.arg) if _is_messages(node.node) else 0
        if self.as_last and side == 1:
            return nodes.Name(NOTHING, "load")
        if side == -1:  # messages[-1] at the first message is the last of all: nobody may look
            fails = nodes.Call(nodes.Name(NOTHING, "load"), [], [], None, None)
            return nodes.CondExpr(node.arg.left, node, fails)  # pyright: ignore
        return self.generic_visit(node)


class _Generation(NodeTransformer):
    """The part behind the loop, with or without the generation prompt."""

    def __init__(self, generation: bool):
        self.wanted = generation

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        return nodes.Const(self.wanted) if node.name == "add_generation_prompt" else node
