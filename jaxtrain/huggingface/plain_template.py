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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from jaxtrain.errors import UserError
from jaxtrain.text_safety import name_type

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


TYPE_TESTS = frozenset("defined undefined none string mapping iterable sequence".split())
"""Tests of Jinja whose results depend on the type of a value alone."""
CHANGING = frozenset({"strftime_now", "lipsum", "joiner", "cycler", "random"})
"""Names whose values differ from one rendering to the next."""
Kind = Literal["list", "message", "content", "text", "other"]
"""What an expression holds: messages, one of them, a content or a trimmed one, a text with contents
in it, or nothing of a content."""


class ReadsContents(Exception):
    """A template depends on the text of a content."""


def only_writes_contents(text: str) -> bool:
    """Return True if a template does nothing with the contents of messages but write them, as they
    are or trimmed, and test if they are blank.

    Of two conversations that differ in contents that are not blank, such a template writes the same
    around them. The syntax tree decides; where it is in doubt the answer is False.
    """
    tree, uses = parse(text), _Uses()
    if any(name.name in CHANGING for name in tree.find_all(nodes.Name)):
        return False
    if any(node.name in CHANGING for node in tree.find_all(nodes.Filter)):
        return False
    try:
        while True:  # until no name holds more than before
            before = dict(uses.kinds)
            uses.run(tree.body)
            if uses.kinds == before:
                return True
    except ReadsContents:
        return False


class _Uses:
    """Abstract run of a template over the kinds of its values."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {"messages": "list"}
        self.in_macro = False

    def run(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: Any) -> None:
        match node:
            case nodes.Output():
                written = {self.find_kind(child) for child in node.nodes}
                _require(written <= {"content", "text", "other"})
                _require(not self.in_macro or written <= {"other"})
            case nodes.Assign() if isinstance(node.target, nodes.Name):
                self._bind(node.target.name, self.find_kind(node.node))
            case nodes.Assign():
                self._require_other(node.node)
            case nodes.AssignBlock() if isinstance(node.target, nodes.Name):
                _require(node.filter is None)
                self.run(node.body)
                self._bind(node.target.name, "text")
            case nodes.If():
                self._test(node.test)
                self.run((*node.body, *node.elif_, *node.else_))
            case nodes.For():
                self._loop(node)
            case nodes.Macro():
                _require(not node.defaults)
                before, self.in_macro = self.in_macro, True
                self.run(node.body)
                self.in_macro = before
            case nodes.CallBlock():  # transformers' {% generation %}, which writes its body
                name = getattr(node.call.node, "name", "")
                _require(name == "_generation_support")
                self.run(node.body)
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                raise ReadsContents

    def _loop(self, node: nodes.For) -> None:
        _require(not node.recursive)
        kind = self.find_kind(node.iter)
        _require(kind in ("list", "other"))
        if kind == "list":
            _require(isinstance(node.target, nodes.Name))
            self._bind(node.target.name, "message")  # pyright: ignore
        else:
            for name in (node.target, *node.target.find_all(nodes.Name)):
                if isinstance(name, nodes.Name):
                    self._bind(name.name, "other")
        if node.test is not None:
            self._test(node.test)
        self.run((*node.body, *node.else_))

    def _bind(self, name: str, kind: Kind) -> None:
        self.kinds[name] = _join(self.kinds.get(name, kind), kind)

    def _test(self, node: nodes.Node) -> None:
        _require(self.find_kind(node) != "text")

    def _require_other(self, *children: nodes.Node) -> None:
        _require(all(self.find_kind(child) == "other" for child in children))

    def find_kind(self, node: Any) -> Kind:
        """Return the kind of an expression; raises ReadsContents."""
        match node:
            case nodes.Name():
                return self.kinds.get(node.name, "other")
            case nodes.Getattr():
                _require(node.attr not in ("previtem", "nextitem"))
                return self._member(self.find_kind(node.node), nodes.Const(node.attr))
            case nodes.Getitem():
                return self._member(self.find_kind(node.node), node.arg)
            case nodes.Add():
                return self._joined(node.left, node.right)
            case nodes.Concat():
                return self._joined(*node.nodes)
            case nodes.CondExpr():
                self._test(node.test)
                alternative: Kind = "other" if node.expr2 is None else self.find_kind(node.expr2)
                return _join(self.find_kind(node.expr1), alternative)
            case nodes.And() | nodes.Or():
                self._test(node.left)
                return _join(self.find_kind(node.left), self.find_kind(node.right))
            case nodes.Not():
                self._test(node.node)
                return "other"
            case nodes.Filter(name="trim") if node.node is not None and not node.args:
                return self._trimmed(node.node)
            case nodes.Filter(name="length" | "count") if self.find_kind(node.node) == "list":
                return "other"
            case nodes.Call(node=nodes.Getattr(attr="strip", node=stripped)) if not node.args:
                return self._trimmed(stripped)
            case nodes.Test() if node.name in TYPE_TESTS:
                self.find_kind(node.node)
                return "other"
            case nodes.Compare() if self._asks_for_key(node):
                return "other"
            case _:
                self._require_other(*node.iter_child_nodes())
                return "other"

    def _member(self, kind: Kind, key: nodes.Node) -> Kind:
        named = isinstance(key, nodes.Const) and isinstance(key.value, str)
        if kind == "message":
            _require(named and key.value not in dir(dict))  # pyright: ignore
            return "content" if key.value == "content" else "other"  # pyright: ignore
        if kind == "list":
            _require(not named)
            self._require_other(
                *(key.iter_child_nodes() if isinstance(key, nodes.Slice) else [key])
            )
            return "list" if isinstance(key, nodes.Slice) else "message"
        _require(kind == "other")
        self._require_other(key)
        return "other"

    def _joined(self, *parts: nodes.Node) -> Kind:
        kinds = {self.find_kind(part) for part in parts}
        _require(kinds <= {"content", "text", "other"})
        return "other" if kinds == {"other"} else "text"

    def _trimmed(self, node: nodes.Node) -> Kind:
        kind = self.find_kind(node)
        _require(kind in ("content", "other"))
        return kind

    def _asks_for_key(self, node: nodes.Compare) -> bool:
        """Return True for `"name" in message`."""
        of_message = [op for op in node.ops if op.op in ("in", "notin")]
        return (
            len(node.ops) == len(of_message) == 1
            and isinstance(node.expr, nodes.Const)
            and self.find_kind(node.ops[0].expr) == "message"
        )


def _join(first: Kind, second: Kind) -> Kind:
    if first == second:
        return first
    _require({first, second} <= {"content", "text", "other"})
    return "text"


def _require(condition: bool) -> None:
    if not condition:
        raise ReadsContents


def write_literal(value: Any, source: str) -> str:
    """Return a value as a Jinja expression, which a list of such values is, too."""
    if isinstance(value, Mapping):
        items = (f"{ascii(str(k))}: {write_literal(v, source)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(write_literal(item, source) for item in value)}]"
    if value is None or isinstance(value, str | bool | int | float):
        return ascii(value)
    if isinstance(value, date):
        return ascii(value.isoformat())
    raise UserError(f"{source}: {name_type(value)} cannot be written into a chat template")
