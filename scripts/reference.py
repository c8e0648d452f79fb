"""Write docs/reference/cli.md, settings.md and python.md from the declarations in the code.

python scripts/reference.py            # rewrite
python scripts/reference.py --check    # exit 1 if a page is out of date
"""

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import outpace  # noqa: E402
from outpace.cli.main import COMMANDS  # noqa: E402
from outpace.cli.options import as_words  # noqa: E402
from outpace.cli.parser import Parser  # noqa: E402
from outpace.records.base import Record  # noqa: E402
from outpace.records.settings import TrainSettings  # noqa: E402

PAGES = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by `python scripts/reference.py`: edit the code instead. -->\n\n"
KINDS = {"launch": ("slurm", "kubernetes")}  # commands that have one parser for each of these kinds
SETTINGS = TrainSettings.model_fields
_DOCS_PATH = re.compile(r"docs/((?:[a-z-]+/)*)([a-z-]+)\.md")


class _FoundError(Exception):
    """Carries a command's parser out of the command."""

    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(command: str, *kind: str) -> Parser:
    """Return the parser with which a command reads its options."""
    module = importlib.import_module(f"outpace.cli.{command}")

    def found(parser: Parser, argv: list[str]) -> argparse.Namespace:
        raise _FoundError(parser)

    read, Parser.read = Parser.read, found  # type: ignore[method-assign]
    try:
        module.run([*kind, "--help"], {})
    except _FoundError as caught:
        return caught.parser
    finally:
        Parser.read = read  # type: ignore[method-assign]
    raise SystemExit(f"outpace {command} does not read its options with a Parser")


def cell(text: str) -> str:
    """Return a text as a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def sentence(text: str) -> str:
    """Return a line of help as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def linked(text: str) -> str:
    """Return a text in which links replace the names of documentation files."""
    return _DOCS_PATH.sub(r"[\2](../\1\2.md)", text)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def usage(action: argparse.Action) -> str:
    """Return an option as users write it."""
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if not names:
        return f"`{metavar or action.dest}`"
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`{names[0]}`, `--no-{names[0].removeprefix('--')}`"
    if action.nargs != 0 and not metavar:
        choices = action.choices and "{" + ",".join(map(str, action.choices)) + "}"
        metavar = choices or action.dest.upper()
    takes = "" if action.nargs == 0 else f" {metavar}"
    return ", ".join(f"`{name}`" for name in names[:-1]) + (", " if names[1:] else "") + (
        f"`{names[-1]}{takes}`"
    )  # fmt: skip


def is_setting(action: argparse.Action) -> bool:
    """Return whether an option is a setting of a run, which settings.md describes."""
    field = SETTINGS.get(action.dest)
    said = field is not None and (action.help or "").replace("%%", "%")
    return bool(said) and str(said).startswith(field.description or "\0")


def command_part(title: str, parser: Parser) -> Iterator[str]:
    """Yield the description of a command: its purpose, arguments and options."""
    arguments = parser.arguments
    yield f"{title}\n\n{arguments.description or ''}\n\n"
    line = arguments.format_usage().removeprefix("usage: ").strip()
    if arguments.usage:
        yield f"```text\n{' '.join(line.split())}\n```\n\n"
    settings: list[str] = []
    rows: list[list[str]] = []
    for action in arguments._actions:
        if action.dest in ("help", "json") or action.help == argparse.SUPPRESS:
            continue
        if is_setting(action):
            settings.append(action.option_strings[-1 if "--no-" not in str(
                action.option_strings[-1]) else 0])  # fmt: skip
            continue
        rows.append([usage(action), cell(linked((action.help or "").replace("%%", "%")))])
    if rows:
        yield table(["option", "meaning"], rows)
    if len(settings) == len(SETTINGS):
        yield "It also takes every [setting](settings.md).\n\n"
    elif settings:
        listed = ", ".join(f"`{name}`" for name in settings)
        yield f"[Settings](settings.md) that it takes: {listed}.\n\n"
    if arguments.epilog:
        yield linked(" ".join(arguments.epilog.split())) + "\n\n"


def cli_page() -> str:
    """Return the page of all commands."""
    parts = [
        "# Command line\n\n", GENERATED,
        "`outpace COMMAND --help` prints the same. Every command takes `--json`, and ends with one "
        "of these [exit codes](exit-codes.md).\n\n",
        table(["command", "what it does"], [[f"[`{name}`](#outpace-{name})", cell(said)]
                                            for name, said in COMMANDS.items()]),
    ]  # fmt: skip
    for name in COMMANDS:
        if name not in KINDS:
            parts += command_part(f"## outpace {name}", parser_of(name))
            continue
        parts.append(f"## outpace {name}\n\n{sentence(COMMANDS[name])}\n\n")
        for kind in KINDS[name]:
            parts += command_part(f"### outpace {name} {kind}", parser_of(name, kind))
    return "".join(parts)


def settings_page() -> str:
    """Return the page of all settings of a run, by group."""
    parser = parser_of("train")
    actions = {action.dest: action for action in parser.arguments._actions}
    parts = [
        "# Settings\n\n", GENERATED,
        "A setting is an option of `outpace train`, a key of the file that `--config` names, and a "
        "keyword of `outpace.train`: `--global-batch 64`, `global_batch = 64`, `global_batch=64`. "
        "The command line overrides the file. `--print-config` shows every setting and its "
        "origin.\n\n",
    ]  # fmt: skip
    for group in parser.arguments._action_groups:
        named = [action.dest for action in group._group_actions if action.dest in SETTINGS]
        if not named:
            continue
        parts.append(f"## {sentence(group.title or '').removesuffix('.')}\n\n")
        rows = []
        for name in named:
            field = SETTINGS[name]
            default = "" if field.default in (None, ()) else f"`{as_words(field.default)}`"
            rows.append([usage(actions[name]), default, cell(linked(field.description or ""))])
        parts.append(table(["option", "default", "meaning"], rows))
    return "".join(parts)


class _Unquote(ast.NodeTransformer):
    """Replaces annotations written as strings by their contents."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        is_literal = isinstance(node.value, ast.Name) and node.value.id == "Literal"
        return node if is_literal else self.generic_visit(node)


def source(documented: Any) -> Any:
    """Return the syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(documented))).body[0]


def written(annotation: ast.expr) -> str:
    """Return a type as written in the source, so that it is the same in all versions of Python."""
    return text_of(_Unquote().visit(annotation))


def signature(function: Any, name: str) -> str:
    """Return a function's signature, with one argument per line if there are many."""
    tree = source(function)
    arguments = tree.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    words = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        words.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        words.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [_argument(*pair) for pair in pairs]
    if arguments.kwarg:
        words.append("**" + _argument(arguments.kwarg, None))
    tail = f" -> {written(tree.returns)}" if tree.returns else ""
    short = f"{name}({', '.join(words)}){tail}"
    if len(short) <= 88:
        return short
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){tail}"


def text_of(value: ast.expr) -> str:
    """Return a value in the project's notation."""
    return ast.unparse(value).replace("'", '"')


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {written(argument.annotation)}" if argument.annotation else ""
    equals = " = " if kind else "="
    return argument.arg + kind + (f"{equals}{text_of(default)}" if default else "")


def field_types(kind: type[Record]) -> dict[str, str]:
    """Return the type of each field of a record, also inherited ones, as written in the source."""
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, Record)]
    return {line.target.id: written(line.annotation) for base in bases for line in source(base).body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)}  # fmt: skip


def prose(documented: Any) -> str:
    """Return a docstring as Markdown, with its example as a code block."""
    text = inspect.getdoc(documented) or ""
    said, mark, example = text.partition(">>> ")
    shown = f"\n\n```pycon\n{mark}{example.strip()}\n```" if mark else ""
    return said.strip() + shown + "\n\n"


def function_part(name: str, function: Any) -> str:
    """Return the section on a public function: its signature and docstring."""
    shown = signature(function, f"outpace.{name}")
    return f"### {name}\n\n```python\n{shown}\n```\n\n{prose(function)}"


def code(text: str) -> str:
    """Return a text as code in a table cell."""
    return "`" + text.replace("|", "\\|") + "`"


def default_of(field: Any) -> str:
    """Return a field's default as a table cell."""
    return "" if field.is_required() else code(repr(field.get_default(call_default_factory=True)))


def class_part(name: str, kind: type) -> str:
    """Return the section on a class: its docstring, its fields, and its own public methods."""
    parts = [f"### {name}\n\n{prose(kind)}"]
    own = {key: value for key, value in vars(kind).items() if not key.startswith("_")}
    if name == "TrainSettings":
        return parts[0] + "Its fields are the [settings](settings.md) of a run.\n\n"
    if issubclass(kind, Record):
        types = field_types(kind)
        rows = [[f"`{key}`", code(types[key]), default_of(field), cell(field.description or "")]
                for key, field in kind.model_fields.items()]  # fmt: skip
        columns = 4 if any(row[3] for row in rows) else 3
        head = ["field", "type", "default", "meaning"][:columns]
        parts.append(table(head, [row[:columns] for row in rows]))
    found = {key: value for key, value in own.items()
             if (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
             and not key.startswith("model_")}  # fmt: skip
    documented = {key: value.__func__ if isinstance(value, classmethod) else value
                  for key, value in found.items()}  # fmt: skip
    rows = []
    for key, value in documented.items():
        said = cell((inspect.getdoc(value) or "").split("\n\n")[0])
        if said:
            call = (
                key if isinstance(value, property) else f"{key}({', '.join(arguments_of(value))})"
            )
            rows.append([f"`{call}`", said])
    if rows:
        parts.append(table(["attribute or method", "what it is"], rows))
    return "".join(parts)


def arguments_of(function: Any) -> list[str]:
    """Return the names of a function's arguments."""
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls")]


def python_page() -> str:
    """Return the page of everything that `import outpace` provides."""
    public = {name: getattr(outpace, name) for name in outpace.__all__ if name != "__version__"}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in public.items() if name not in functions}
    errors = {name: value for name, value in classes.items() if issubclass(value, Exception)}
    parts = [
        "# Python API\n\n", GENERATED,
        "What `import outpace` gives. It imports torch only when something needs it. The examples "
        "run in the tests, in this order: `train` first.\n\n## Functions\n\n",
    ]  # fmt: skip
    order = ["train", *(name for name in functions if name != "train")]
    parts += [function_part(name, functions[name]) for name in order]
    parts.append("## Classes\n\n")
    parts += [class_part(name, value) for name, value in classes.items() if name not in errors]
    parts.append("## Errors\n\n")
    parts.append(table(["error", "raised when"], [
        [f"`{name}`", cell((inspect.getdoc(value) or "").split("\n\n")[0])]
        for name, value in errors.items()]))  # fmt: skip
    return "".join(parts)


def main() -> int:
    """Write the pages, or compare them with the existing ones. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, made in (
        ("cli", cli_page()),
        ("settings", settings_page()),
        ("python", python_page()),
    ):
        page = PAGES / f"{name}.md"
        made = made.rstrip() + "\n"
        if not page.exists() or page.read_text(encoding="utf-8") != made:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(made, encoding="utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: run python scripts/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
