"""Layers of packages, and what importing them must not cost."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets")


def imported_by(program: str) -> set[str]:
    """Top-level modules loaded after running a program in a fresh interpreter."""
    code = (
        f"{program}\nimport sys\nprint('\\n' + ' '.join({{m.split('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


def test_packages_import_only_from_packages_below_them() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("room", ["records", "catalog", "planner"])
def test_rooms_without_torch_import_none(room: str) -> None:
    program = (
        f"import importlib, pkgutil, outpace.{room} as room\n"
        "names = [m.name for m in pkgutil.walk_packages(room.__path__, room.__name__ + '.')]\n"
        "assert names\n"
        "for name in names: importlib.import_module(name)\n"
    )
    assert not imported_by(program).intersection(HEAVY)


def test_importing_outpace_imports_no_torch() -> None:
    program = "import outpace\noutpace.ModelSpec, outpace.Plan, outpace.TrainSettings"
    assert not imported_by(program).intersection(HEAVY)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["trian"]])
def test_the_bare_command_is_light(argv: list[str]) -> None:
    modules = imported_by(f"from outpace.cli.main import main\nmain({argv!r})")
    assert not modules.intersection({*HEAVY, "pydantic", "rich", "numpy"})


def test_the_settings_are_read_without_torch() -> None:
    program = "from outpace.cli.main import main\nassert main(['train', '--print-config']) == 0"
    assert not imported_by(program).intersection(HEAVY)


def test_past_runs_are_listed_without_torch(tmp_path: Path) -> None:
    program = f"from outpace.cli.main import main\nassert main(['runs', {str(tmp_path)!r}]) == 0"
    assert not imported_by(program).intersection(HEAVY)


def test_every_public_name_is_there() -> None:
    import outpace

    assert set(outpace.__all__) <= set(dir(outpace))
    for name in outpace.__all__:
        assert getattr(outpace, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        outpace.trian


def test_what_a_module_says_it_exports_is_defined_there() -> None:
    said = [path for path in (ROOT / "outpace").rglob("*.py") if "__all__ = [" in path.read_text()]
    assert len(said) > 4
    for path in said:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        assert [one for one in module.__all__ if not hasattr(module, one)] == [], name


def test_train_is_a_plain_function() -> None:
    import outpace

    assert inspect.isfunction(outpace.train)
