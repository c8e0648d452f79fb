"""Whatever a file holds, its reader takes it or says in a sentence what is wrong with it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# What the benchmark uses, too; there is no package of tests.
sys.path.insert(0, str(Path(__file__).parent))

from found import FOUND, Found
from law import checked, fuzz
from readers import READERS
from results import group


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """Checkpoints need a process group, and the tests of other files need that there is none."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        group.cache_clear()


def test_functions_that_readers_name_are_defined_in_their_modules() -> None:
    for reader in READERS.values():
        for module, names in reader.code.items():
            text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
            for name in names:
                *classes, function = name.split(".")
                for line in (*(f"class {one}" for one in classes), f"def {function}"):
                    assert re.search(rf"\b{line}\b", text), (reader.name, module, name)


ROOT = Path(__file__).parents[2]
# Cases of each reader: a share each time, and what issue 8 asks for with the slow tests.
QUICK, ALL = 50, 1000
each_reader = pytest.mark.parametrize("name", READERS)


@each_reader
def test_what_is_whole_is_taken(name: str) -> None:
    assert [checked(READERS[name], tree) for tree in READERS[name].trees()].count(None)


@each_reader
def test_what_is_broken_is_taken_or_refused_in_a_sentence(name: str) -> None:
    fuzz(READERS[name], QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_reader
def test_that_of_many_more(name: str) -> None:
    fuzz(READERS[name], ALL)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.reader}: {found.raised[:60]}")
def test_what_once_broke_a_reader_does_not_again(found: Found) -> None:
    checked(READERS[found.reader], found.tree)
