"""Chat templates of strangers, rendered by transformers within a budget.

A template is a program: it may loop, recurse and multiply without end. transformers' sandbox keeps
it from the machine, not from its time and memory. So its syntax tree gets, before it is compiled,

    {% for %}, {% macro %}, {% call %}     a tick at the start of each body
    a ~ b, a + b, a * b, a ** b, a % b     the functions of `template_budget.py` of those names
    f(...), x | f(...), x[a:b], {{ x }}    a look at the arguments before, at the result after
    [...], {...}, a == b                   a look at how much is in them

and then goes the way of every template through `apply_chat_template`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from jaxtrain.errors import UserError
from jaxtrain.huggingface import template_budget
from jaxtrain.huggingface.template_budget import OverBudget
from jaxtrain.text_safety import escape_control_chars

MAX_LENGTH = 2**18
"""Characters; published ones have up to about 20,000."""
NODE_BYTES = 64
"""What evaluating a node of the syntax tree is taken to cost at least."""
OPERATORS = {nodes.Add: "add", nodes.Mul: "multiply", nodes.Pow: "power", nodes.Mod: "modulo"}


class TemplateFailed(Exception):
    """The chat template refuses these messages."""


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any, generation: bool
) -> str:
    """What the tokenizer's chat template writes.

    Raises TemplateFailed with the template's reason, UserError for a template that cannot be
    compiled or that takes more time or memory than any conversation needs.
    """
    place = f"the chat template of {tokenizer.name_or_path} (model.chat_template)"
    try:
        guarded = guard(tokenizer.get_chat_template(tools=tools or None))
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(f"{place} cannot be read: {_say(error)}") from None
    except ValueError as error:
        raise UserError(f"{place}: {_say(error)}") from None
    return run(tokenizer, messages, tools, generation, guarded)


def run(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    generation: bool,
    program: nodes.Template,
    **names: Any,
) -> str:
    """What a guarded template writes; raises as `render`. names: further ones that it may read."""
    place = f"the chat template of {tokenizer.name_or_path} (model.chat_template)"
    try:
        with template_budget.limited():
            text = tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                chat_template=program,
                add_generation_prompt=generation,
                tokenize=False,
                **names,
            )
            template_budget.check_output(text, (list(messages), tools))
            return text
    except OverBudget as error:
        raise UserError(
            f"{place} is stopped: {_say(error)}; a rendering gets {template_budget.SECONDS:g} s and"
            f" {template_budget.TOTAL_BYTES >> 20} MiB. Name another one as model.chat_template"
        ) from None
    except SyntaxError as error:
        raise UserError(f"{place} cannot be compiled: {_say(error)}") from None
    except Exception as error:  # a program of a stranger: it may raise anything
        raise TemplateFailed(f"chat template: {_say(error)}") from error


@functools.lru_cache(maxsize=64)
def guard(text: str) -> nodes.Template:
    """The template's syntax tree, with its budget written in."""
    return BudgetInstrumenter().visit(parse(text))


def parse(text: str) -> nodes.Template:
    """The template's syntax tree; ValueError for what is no text or too long a one."""
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        found = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"it must be a text of at most {MAX_LENGTH} characters, found {found}")
    from transformers.utils import chat_template_utils  # seconds: only here

    # The one place where transformers keeps its filters, functions and tags for templates.
    environment = chat_template_utils._compile_jinja_template("").environment
    return environment.parse(text)


class BudgetInstrumenter(NodeTransformer):
    """Writes the calls of `template_budget` into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._tick(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        # Its text is no expression that could be looked at first.
        if node.filter.name in template_budget.MULTIPLIES | template_budget.REFUSED:
            raise ValueError(f"{{% filter {node.filter.name} %}} is not available here")
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child
            if isinstance(child, nodes.TemplateData | nodes.Const)
            else _call("shown", [child])
            for child in node.nodes
        ]
        return node

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node])

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("made", [node])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if not any(isinstance(operand, nodes.Const) for operand in operands):
            node.expr = _call("compared", [node.expr])
            for operand in node.ops:
                operand.expr = _call("compared", [operand.expr])
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.args and not all(isinstance(arg, nodes.Const) for arg in node.args):
            node.node = _call("compared", [node.node])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat", node.nodes)

    def visit_BinExpr(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        guarded = OPERATORS.get(type(node))
        return _call(guarded, [node.left, node.right]) if guarded else node

    visit_Add = visit_Mul = visit_Pow = visit_Mod = visit_BinExpr

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return _call("made", [self._check(node)])

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is None:  # within a FilterBlock
            return node
        self.generic_visit(node)
        checked = node.name in template_budget.CHECKED
        name = "filtered" if checked else "filters"
        node.node = _call(name, [node.node, nodes.Const(node.name)])
        return _call("made", [_check_arguments(node) if checked else node])

    def _check(self, node: nodes.Call) -> nodes.Call:
        self.generic_visit(node)
        if not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs):
            return node
        node.node = _call("calls", [node.node])
        return _check_arguments(node)

    def _tick(self, node: Any) -> Any:
        """Count the body, and each time that it is run."""
        data = sum(len(child.data) for child in node.find_all(nodes.TemplateData))
        cost = 4 * data + NODE_BYTES * sum(1 for _ in node.find_all(nodes.Node))
        if isinstance(node, nodes.CallBlock):
            node.call = self._check(node.call)
            node.body = [self.visit(child) for child in node.body]
        else:
            self.generic_visit(node)
        node.body = [nodes.Output([_call("tick", [nodes.Const(cost)])]), *node.body]
        return node


def _call(name: str, args: list[Any]) -> nodes.Expr:
    function = nodes.ImportedName(f"{template_budget.__name__}.{name.upper()}")
    return nodes.Mod(function, nodes.Tuple(args, "load"))


def _check_arguments(node: Any) -> Any:
    """All arguments through `positional` and `named`, in the order in which they are evaluated."""
    pairs = [nodes.Pair(nodes.Const(word.key), word.value) for word in node.kwargs]
    more = [] if node.dyn_args is None else [node.dyn_args]
    node.dyn_args = _call("positional", [nodes.List(node.args), *more])
    more = [] if node.dyn_kwargs is None else [node.dyn_kwargs]
    node.dyn_kwargs = _call("named", [nodes.Dict(pairs), *more])
    node.args, node.kwargs = [], []
    return node


def _say(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return escape_control_chars(said)[:200]
