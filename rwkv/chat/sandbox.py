"""Runs chat templates in a jinja2 environment without access to Python, and limits time and memory.

The environment works like that of transformers. A template comes with a downloaded checkpoint, so templates are not trusted.
Loops, calls and operators count against a Limit. So a template can neither run for ever nor fill memory, as with
`{% for i in range(99999) %}{% for j in range(99999) %}`, `{{ "a" * 10 ** 10 }}`, or a string that is doubled repeatedly.
jinja2's own sandbox does not limit time and memory (https://jinja.palletsprojects.com/en/stable/sandbox/).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from time import thread_time
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 3.0                            # CPU time limit of one rendering
CHARACTERS = 2**25                       # characters that one rendering may create, in addition to COPIES of the conversation
COPIES = 50
ITEM = 8                                 # a list item counts as this many characters
BITS = 10_000                            # maximum bits of an integer
WIDTH = 10_000                           # maximum width to which a string may be padded or indented
EVERY = 128                              # steps between two checks of the time

PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")            # methods of strings
PADDED = ("center", "indent", "wordwrap", "batch", "slice", "tojson", "round", "truncate")       # filters
SHOWN = ("tojson", "string", "join", "format", "pprint", "escape", "e", "urlencode", "replace", "upper", "lower", "trim")
WIDE = re.compile(r"\d{5,}|\*")          # matches a large width in a format string


class LimitReached(Exception):
    """Raised if a template takes too much time or memory. Not a TemplateError, so that rendering cannot continue."""


class Limit:
    """Counts down the time and the characters that one rendering may still use.

    `characters` is the length of the conversation.
    """

    def __init__(self, characters: int = 0) -> None:
        self._end = thread_time() + SECONDS
        self._characters = CHARACTERS + COPIES * characters
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % EVERY == 0 and thread_time() > self._end:
            raise LimitReached(f"rendering takes more than {SECONDS:g} seconds")

    def make(self, size: int) -> None:
        """Counts `size` characters, which the template is about to create or has just created."""
        self._characters -= size
        if self._characters < 0:
            raise LimitReached("the template creates too much text")


_limit: ContextVar[Limit] = ContextVar("limit")


@contextmanager
def limited(characters: int = 0) -> Iterator[Limit]:
    limit = Limit(characters)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment with limits. Templates must be compiled and rendered inside limited()."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        self.filters |= {name: _counting_filter(name, filter) for name, filter in self.filters.items()}
        self.filters |= {"counted passes": _count_passes, "counted text": _count_output, "joined": _join_texts}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operator(operator, left, right)
        return _count_result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: object, *args: Any, **kwargs: object) -> object:
        _limit.get().step()
        if isinstance(__obj, LoopContext) and args:              # a call of a recursive loop: loop(...)
            args = (_count_items(args[0]), *args[1:])
        method = getattr(__obj, "__wrapped__", __obj)            # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return _count_result(super().call(__context, __obj, *args, **kwargs))


class GenerationBlock(Extension):
    """Ignores {% generation %} and {% endgeneration %}, which mark answers in some templates, and renders what they enclose."""

    tags = {"generation"}                                        # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Wraps the loops, output, concatenations with ~ and slices of a parsed template in filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _wrap(node.iter, "counted passes")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_wrap(nodes.Const(child.data) if isinstance(child, nodes.TemplateData) else child, "counted text")
                      for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(nodes.List(node.nodes, lineno=node.lineno), "joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(node, "counted text") if isinstance(node.arg, nodes.Slice) else node


def _wrap(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context                            # prevents evaluation at compile time
def _count_passes(context: Context, value: Iterable[object]) -> Iterator[object]:
    return _count_items(value)


@pass_context
def _count_output(context: Context, value: object) -> object:
    _limit.get().step()
    _count_text(value)
    return _count_result(value)


@pass_context
def _join_texts(context: Context, values: Iterable[object]) -> str:
    _count_text(values)
    texts = [str(value) for value in values]
    _limit.get().make(sum(map(len, texts)))
    return "".join(texts)


def _count_items(values: Iterable[object]) -> Iterator[object]:
    limit = _limit.get()
    for value in values:
        limit.step()
        yield value


def _count_text(value: object) -> None:
    limit = _limit.get()
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        limit.make(len(value))
        for item in value:               # counts a list again each time that it occurs in the value
            limit.step()
            _count_text(item)
    elif isinstance(value, str):
        limit.make(len(value))


def _count_result(value: object) -> object:
    """Counts the characters or items of a value, and returns the value. A returned iterator counts while it is read."""
    if isinstance(value, (str, list, tuple, dict)):
        _limit.get().make(len(value) * (1 if isinstance(value, str) else ITEM))
    elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return _count_items(value)
    return value


def _counting_filter(name: str, filter: Callable[..., object]) -> Callable[..., object]:
    passed = getattr(filter, "jinja_pass_arg", None)             # set if the filter's first argument is a context

    def counting(*args: Any, **kwargs: object) -> object:
        limit = _limit.get()
        limit.step()
        values = args[1:] if passed else args
        if values:
            limit.make(len(values[0]) if isinstance(values[0], Sized) else 0)
        if name in SHOWN:
            _count_text(values)
        arguments = [*values[1:], *kwargs.values()]
        if name in PADDED:
            _check_width(arguments)
        if name == "join" and values:
            values = ([*values[0]], *values[1:])
            limit.make(sum(len(str(value)) for value in values[0]))
        if name in ("join", "replace", "indent", "format") and values:
            longest = max((len(text) for text in arguments if isinstance(text, str)), default=0)
            limit.make(longest * (len(values[0]) if name != "indent" else 0))
        if name == "indent" and values:
            width = next((width for width in arguments if isinstance(width, int)), 4)
            limit.make(str(values[0]).count("\n") * width)
        if name == "format":
            _check_format(values[0] if values else "")
        return _count_result(filter(*((args[0], *values) if passed else values), **kwargs))

    if passed is not None:
        counting.jinja_pass_arg = passed                         # type: ignore[attr-defined]
    return counting


def _check_operator(operator: str, left: object, right: object) -> None:
    limit = _limit.get()
    limit.step()
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                limit.make(len(value) * max(times, 0) * (1 if isinstance(value, str) else ITEM))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > BITS:
            raise LimitReached("the template computes a number that is too large")
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        _count_text(right)


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> tuple[Any, ...]:
    """Counts the result of a string method before the call. Returns the arguments, with iterators replaced by lists."""
    limit = _limit.get()
    limit.make(len(text))
    arguments = [*args, *kwargs.values()]
    if name in PADDING:
        _check_width(arguments)
        limit.make(text.count("\t") * WIDTH if name == "expandtabs" else WIDTH)
    elif name == "join" and args:
        args = ([*_count_items(args[0])],)
        limit.make(sum(len(str(item)) + len(text) for item in args[0]))
    elif name == "replace" and len(args) > 1 and isinstance(args[1], str):
        limit.make(text.count(str(args[0])) * len(args[1]))
    elif name == "translate":
        raise LimitReached("the template calls the string method translate, which is not allowed")
    elif name in ("format", "format_map"):
        _check_format(text)
        limit.make(text.count("{") * max((len(str(argument)) for argument in arguments), default=0))
    return args


def _check_width(arguments: Iterable[object]) -> None:
    if any(isinstance(width, (int, float)) and width > WIDTH for width in arguments):
        raise LimitReached(f"the template pads a string to more than {WIDTH} characters")


def _check_format(text: object) -> None:
    if WIDE.search(str(text)):
        raise LimitReached("the template formats a string with too large a field width")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if WIDE.search(format):
        raise LimitReached("the template formats a date with too large a field width")
    return datetime.now().astimezone().strftime(format)


def _tojson(x: object, ensure_ascii: bool = False, indent: int | str | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    """Formats JSON as the filter tojson of transformers does, which escapes neither non-ASCII letters nor HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
