"""Check the language of outpace's code against docs/development/glossary.md.

    python tests/test_language.py            show each violation with its place and remedy
    python tests/test_language.py --prune    delete lines of the list that no longer occur

Only syntax trees are read; nothing of outpace is imported.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/development/glossary.md"
LISTED = Path(__file__).with_name("language_violations.txt")


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Words that name nothing by themselves.
PREPOSITIONS = words_of(
    """
    about above across after against along among around as at before behind below beneath
    beside besides between beyond by despite down during for from in inside into like near of
    off on onto out outside over per since than through throughout till to toward towards
    under unlike until up upon via with within without
    """
)
PRONOUNS = words_of(
    """
    all another any anything both each either every everyone everything he her hers him his
    how it its me mine my neither nobody none nothing one ones other others our ours she some
    someone something such that their theirs them these they this those us we what whatever
    when whence where which whichever while who whoever whom whose why you your yours
    """
)
ADVERBS = words_of(
    """
    again ahead alike alone also always anew apart aside away beforehand else elsewhere enough
    ever here instead meanwhile never now once otherwise perhaps so still then there thus
    together too twice
    """
)
# Irregular ones, whose form is not also a verb's or a noun's.
PARTICIPLES = words_of(
    """
    arisen been begun born bought bound broken brought built caught chosen clad come done
    drawn driven eaten fallen fed felt forgotten fought found frozen given gone got gotten
    grown had heard held hidden hung kept known laid learnt led left lent lit lost made meant
    met mistaken paid proven ridden risen said seen sent shaken shown shrunk slept sold sought
    spelt spent spoken sprung stolen stood struck stuck sunk sworn swum taken taught thought
    thrown told torn understood unread unsaid withdrawn won worn woven written
    """
)
NO_PARTICIPLES = words_of(
    """
    bed deepspeed embed exceed feed hundred need proceed red seed shed speed succeed
    """
)
ING_NOUNS = words_of(
    """
    accounting binding briefing building casing ceiling checkpointing crossing embedding encoding
    ending finding grouping heading listing mapping masking meaning naming offloading opening
    padding pairing pinning profiling proving pruning ranking rating reading recording ring
    rounding routing sampling scaling setting sharding sibling spacing spelling spring string
    testing thing throttling timing tokenising tracing training tuning warning wiring wording
    """
)
NO_ADVERBS = words_of(
    """
    ally anomaly apply assembly comply family imply multiply only plotly poly rely reply
    supply tally
    """
)
# Code and names of files within a text: what they are called is another matter.
CODE = re.compile(r"`[^`]*`|\b[\w/]+\.(?:json|md|py)\b")
COLLECTIVE = ["all", "to", "all"]

# Words with which a docstring does not begin: what follows is no phrase that stands alone.
NO_BEGINNINGS = (
    (PREPOSITIONS - {"like"})
    | (
        PRONOUNS  # less the determiners, with which a noun phrase may begin
        - words_of("all another any both each either every none one other some such these this")
    )
    | {"so"}
)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Violation:
    """One deviation from the rules; its `key` is its line in the list."""

    path: str
    scope: str
    rule: str
    word: str
    line: int
    remedy: str

    @property
    def key(self) -> str:
        """Line in the list: without line numbers, so that edits elsewhere leave it alone."""
        return f"{self.path}: {self.scope}: {self.rule}: {self.word}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.scope}: {self.rule}: {self.word!r}. {self.remedy}"


@dataclass(frozen=True)
class Glossary:
    """Forbidden words, each with the term to use, and module names that packages may share."""

    phrases: dict[str, str]
    name_words: dict[str, str]
    shared_modules: frozenset[str]
    kept_values: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, page: str) -> "Glossary":
        """Read the tables' third column, and the sentence about module names."""
        phrases, names = {}, {}
        for line in page.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if line.startswith("|") and len(cells) == 4:
                phrases.update(dict.fromkeys(re.findall(r'"([^"]+)"', cells[2]), cells[0]))
                names.update(dict.fromkeys(re.findall(r"`([^`]+)`", cells[2]), cells[0]))
        shared = re.search(r"^These module names may occur in several packages.*$", page, re.M)
        assert shared, "the glossary has no sentence about module names"
        kept = re.search(r"^These stored values are exempt.*$", page, re.M)
        return cls(
            phrases,
            names,
            frozenset(re.findall(r"`([^`]+)`", shared.group())),
            frozenset(re.findall(r"`([^`]+)`", kept.group()) if kept else ()),
        )

    def find_in_text(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (forbidden phrase, term to use) for each phrase that the text has."""
        flat = " ".join(CODE.sub("", text.lower().replace("’", "'")).split())
        for phrase, term in self.phrases.items():
            if phrase in flat and re.search(rf"(?<![\w-]){re.escape(phrase)}(?![\w])", flat):
                yield phrase, term

    def find_in_name(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield (forbidden word, term to use) for each word that the identifier has."""
        words = "_".join(["", *split_name(name), ""])
        for word, term in (self.phrases | self.name_words).items():
            form = word.replace(" ", "_").replace("'", "")
            if f"_{form}_" in words or f"_{form}s_" in words:
                yield word, term


def split_name(name: str) -> list[str]:
    """Split `snake_case` and `CamelCase` into lower-case words, without digits."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word for word in re.split(r"[_\d]+", spaced.lower()) if word]


def is_participle(word: str) -> bool:
    """Whether the word is a past or present participle, and neither a noun nor a base verb."""
    if word.endswith("ed"):
        return len(word) > 3 and word not in NO_PARTICIPLES
    if word.endswith("ing"):
        return len(word) > 4 and word not in ING_NOUNS
    return word in PARTICIPLES


def is_adverb(word: str) -> bool:
    """Whether the word is an adverb: of the list, or one that ends in -ly."""
    return word in ADVERBS or (word.endswith("ly") and len(word) > 4 and word not in NO_ADVERBS)


def is_bare(name: str) -> bool:
    """Whether an identifier has no noun and no verb in it."""
    words = split_name(name)
    return (
        bool(words)
        and words != COLLECTIVE
        and all(
            word in PREPOSITIONS or word in PRONOUNS or is_adverb(word) or is_participle(word)
            for word in words
        )
    )


def is_flag(function: Function) -> bool:
    """Whether the function is a property that is true or false, such as `closed`."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in function.decorator_list}
    returns = function.returns is not None and ast.unparse(function.returns) == "bool"
    return returns and bool(decorators & {"property", "cached_property"})


class Reader(ast.NodeVisitor):
    """Collects the violations of one module that can be seen in it alone."""

    def __init__(self, path: str, glossary: Glossary) -> None:
        self.path = path
        self.glossary = glossary
        self.scope: list[str] = []
        self.docstrings: set[int] = set()
        self.found: list[Violation] = []

    def add(self, rule: str, word: str, line: int, remedy: str) -> None:
        """Keep one violation at the present scope."""
        scope = ".".join(self.scope) or "module"
        self.found.append(Violation(self.path, scope, rule, word, line, remedy))

    def read(self, tree: ast.Module) -> list[Violation]:
        """Return the violations of a module."""
        self._check_name(Path(self.path).stem, 1)
        self._enter(tree)
        return self.found

    def _check_name(self, name: str, line: int) -> None:
        for word, term in self.glossary.find_in_name(name):
            self.add("word in name", word, line, f"Rename it; the glossary says {term!r}.")

    def _check_text(self, kind: str, text: str, line: int) -> None:
        for phrase, term in self.glossary.find_in_text(text):
            self.add(f"word in {kind}", phrase, line, f"The glossary says {term!r}.")

    def _enter(self, node: Documented) -> None:
        docstring = ast.get_docstring(node)
        if docstring and isinstance(node.body[0], ast.Expr):
            place = node.body[0]
            self.docstrings.add(id(place.value))
            self._check_text("docstring", docstring, place.lineno)
            first = re.match(r"([A-Za-z]+)[\s,.:;]", docstring + " ")
            if first and first[1].lower() in NO_BEGINNINGS:
                self.add(
                    "docstring begins with",
                    first[1],
                    place.lineno,
                    "Begin with a verb in the imperative (Return, Raise, Write) or a noun phrase.",
                )
        self.generic_visit(node)

    def _visit_function(self, node: Function) -> None:
        self.scope.append(node.name)
        if not node.name.startswith("__"):
            if is_bare(node.name) and not is_flag(node):
                self.add(
                    "bare name",
                    node.name,
                    node.lineno,
                    "Rename the function: a verb for what it does or a noun for what it returns.",
                )
            self._check_name(node.name, node.lineno)
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            self._check_name(argument.arg, argument.lineno)
        self._enter(node)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Check a function's name, parameters, docstring and texts."""
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Check a coroutine as a function."""
        self._visit_function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Check a class's name, fields, docstring and methods."""
        self.scope.append(node.name)
        if is_bare(node.name):
            remedy = "Rename the class: a noun for what it is."
            self.add("bare name", node.name, node.lineno, remedy)
        self._check_name(node.name, node.lineno)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self._check_name(statement.target.id, statement.lineno)
        self._enter(node)
        self.scope.pop()

    def visit_Constant(self, node: ast.Constant) -> None:
        """Check texts with a space in them: help and messages, not keys or kept values."""
        text = node.value
        if not isinstance(text, str) or " " not in text or id(node) in self.docstrings:
            return
        if text not in self.glossary.kept_values:
            self._check_text("text", text, node.lineno)


def qualified_name(path: str) -> str:
    """Return a module's name, and before it the folder's where that is a package in a package.

    `outpace/probing/loader/benchmark.py` is read as `loader.benchmark`.
    """
    _, *folders, file = Path(path).parts
    name = Path(file).stem
    return f"{folders[-1]}.{name}" if len(folders) > 1 and name != "__init__" else name


def find_homonyms(modules: dict[str, ast.Module], glossary: Glossary) -> Iterator[Violation]:
    """Yield public classes and modules whose name another package or module has too."""
    classes, names = defaultdict(list), defaultdict(list)
    for path, tree in modules.items():
        names[qualified_name(path)].append(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append((path, node.lineno))
    for name, places in classes.items():
        for path, line in places if len(places) > 1 else []:
            others = ", ".join(other for other, _ in places if other != path)
            remedy = f"Name what sets it apart from the class in {others}."
            yield Violation(path, name, "class name shared", name, line, remedy)
    for name, paths in names.items():
        shared = name.startswith("__") or name in glossary.shared_modules
        if shared or len({Path(path).parent for path in paths}) == 1:
            continue
        for path in paths:
            others = ", ".join(other for other in paths if other != path)
            remedy = (
                f"Rename the file, or, where it is the same thing as in {others}, add the name to "
                "the shared module names in docs/development/glossary.md."
            )
            yield Violation(path, "module", "module name shared", name, 1, remedy)


def check_modules(sources: dict[str, str], glossary: Glossary) -> dict[str, Violation]:
    """Return the violations of the modules (text by path), by key."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    found = [v for path, tree in trees.items() for v in Reader(path, glossary).read(tree)]
    found += find_homonyms(trees, glossary)
    return {violation.key: violation for violation in found}


def check_package() -> dict[str, Violation]:
    """Return the violations of outpace, by key."""
    files = sorted((ROOT / "outpace").rglob("*.py"))
    sources = {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files}
    return check_modules(sources, Glossary.parse(GLOSSARY.read_text("utf-8")))


@pytest.fixture(scope="module")
def present() -> dict[str, Violation]:
    """Violations of outpace as it is."""
    return check_package()


def read_list() -> list[str]:
    """Return the violations that are still allowed, one key a line."""
    return [line for line in LISTED.read_text("utf-8").splitlines() if line]


def test_outpace_has_no_violation_that_is_not_listed(present: dict[str, Violation]) -> None:
    listed = set(read_list())
    fresh = [str(violation) for key, violation in present.items() if key not in listed]
    assert not fresh, (
        f"{len(fresh)} new violations of docs/development/glossary.md. Correct the code; the "
        "list in tests/language_violations.txt only shrinks. Where a file or function that is "
        "listed moved, correct the path or name in its line.\n" + "\n".join(fresh)
    )


# A placeholder in a part of an f-string that has no f of its own stays as it is. Plotly's are %{x},
# a shell's ${x}.
PLACEHOLDER = re.compile(r"(?<![%$]){[A-Za-z_][^{}\s]*}")


def find_unfilled(source: str) -> list[int]:
    """Return the lines of f-strings of which a part has a placeholder, but no f before it."""
    strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    return [
        part.lineno for string in strings for part in string.values
        if isinstance(part, ast.Constant) and PLACEHOLDER.search(part.value)
    ]  # fmt: skip


def test_every_part_of_an_f_string_has_its_prefix() -> None:
    assert find_unfilled('x = (f"{a} and " "{b.c(1)}")') == [1]
    assert find_unfilled('x = f"%{{x}} {a}" "${b}"') == []
    files = sorted((ROOT / "outpace").rglob("*.py"))
    unfilled = {file.name: found for file in files if (found := find_unfilled(file.read_text()))}
    assert unfilled == {}


def test_every_listed_violation_still_occurs(present: dict[str, Violation]) -> None:
    gone = [line for line in read_list() if line not in present]
    assert not gone, (
        "well done. Delete these lines of tests/language_violations.txt (all at once: "
        "python tests/test_language.py --prune):\n" + "\n".join(gone)
    )


PAGE = """
These module names may occur in several packages: `plan`.
These stored values are exempt: `going on`.

| term | meaning | not | as in |
|---|---|---|---|
| resume | continue | "go on", "goes on", "going on", `take_up` | |
| user | whoever | "person" | |
"""


def keys(source: str, path: str = "outpace/nn/loss.py") -> list[str]:
    return [key.split(": ", 1)[1] for key in check_modules({path: source}, Glossary.parse(PAGE))]


@pytest.mark.parametrize(
    "name", sorted(words_of("said _made of one kept_in beside apart _held surely trained _who"))
)
def test_a_name_without_noun_and_verb_is_a_violation(name: str) -> None:
    assert keys(f"class A:\n    def {name}(self) -> int: ...") == [f"A.{name}: bare name: {name}"]
    assert keys(f"async def {name}(): ...") == [f"{name}: bare name: {name}"]
    assert keys(f"class {name}: ...") == [f"{name}: bare name: {name}"]


GOOD = words_of(
    """
    read cut put split run is_kept all_to_all to_json from_hf saved_bytes seed embed speed apply
    family warning sharding on_step_end by_rank __or__ step_time_s forward
    """
)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_verb_or_noun_is_a_good_name(name: str) -> None:
    assert keys(f"def {name}(): ...") == []


def test_a_property_that_is_true_or_false_may_be_a_participle() -> None:
    source = "class A:\n    @property\n    def closed(self) -> {}: ..."
    assert keys(source.format("bool")) == []
    assert keys(source.format("float")) == ["A.closed: bare name: closed"]


@pytest.mark.parametrize("first", ["Of this rank.", "What it is.", "With care.", "Those."])
def test_a_docstring_begins_with_a_verb_or_noun(first: str) -> None:
    word = first.split()[0].strip(".")
    assert keys(f'def f():\n    """{first}"""') == [f"f: docstring begins with: {word}"]
    assert keys(f'class A:\n    """{first}"""') == [f"A: docstring begins with: {word}"]
    assert keys(f'"""{first}"""') == [f"module: docstring begins with: {word}"]


@pytest.mark.parametrize(
    "first", ["Return it.", "This rank's part.", "down(x) of it.", "(in, out) ids.", "`of` it"]
)
def test_other_docstrings_are_left_alone(first: str) -> None:
    assert keys(f'def f():\n    """{first}"""') == []


def test_forbidden_words_are_found_in_names_docstrings_and_texts() -> None:
    source = '''
class GoOn:
    person: int

def take_up_run(persons: int):
    """Goes  on
    with it, as `person` and person.json say."""
    raise ValueError(f"{persons} is no person, it goes on")
'''
    assert keys(source) == [
        "GoOn: word in name: go on",
        "GoOn: word in name: person",
        "take_up_run: word in name: take_up",
        "take_up_run: word in name: person",
        "take_up_run: word in docstring: goes on",
        "take_up_run: word in text: goes on",
        "take_up_run: word in text: person",
    ]
    assert keys("x = 'person'\ndef personal(): 'Take up a personal ego.'") == []


def test_a_value_that_files_keep_may_have_any_words() -> None:
    assert keys("x = 'goes on'") == ["module: word in text: goes on"]
    assert keys("x = 'going on'") == []
    assert keys("x = 'it is going on'") == ["module: word in text: going on"]


def test_a_class_or_module_name_stands_for_one_thing() -> None:
    sources = {
        "outpace/planner/wire.py": "class Work: ...\nclass Plan: ...",
        "outpace/probing/wire.py": "class Work: ...\nclass _Plan: ...",
        "outpace/probing/plan.py": "",
        "outpace/planner/plan.py": "",
        "outpace/probing/loader/benchmark.py": "",
        "outpace/probing/storage/benchmark.py": "",
        "outpace/probing/memory/peak.py": "",
        "outpace/planner/memory/peak.py": "",
    }
    assert list(check_modules(sources, Glossary.parse(PAGE))) == [
        "outpace/planner/wire.py: Work: class name shared: Work",
        "outpace/probing/wire.py: Work: class name shared: Work",
        "outpace/planner/wire.py: module: module name shared: wire",
        "outpace/probing/wire.py: module: module name shared: wire",
        "outpace/probing/memory/peak.py: module: module name shared: memory.peak",
        "outpace/planner/memory/peak.py: module: module name shared: memory.peak",
    ]


def test_the_glossary_has_each_term_once() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| ", GLOSSARY.read_text("utf-8"), re.M)
    terms = [term.strip() for row in rows if row != "term" for term in row.split(",")]
    assert sorted(terms) == sorted(set(terms))


def main() -> int:
    """Show the violations, or delete the lines of those that are gone."""
    present = check_package()
    if "--prune" in sys.argv:
        kept = sorted({line for line in read_list() if line in present})
        LISTED.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        return 0
    for violation in present.values():
        print(violation)
    return 0


if __name__ == "__main__":
    sys.exit(main())
