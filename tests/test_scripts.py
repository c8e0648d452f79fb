"""The scripts' own work, with an interpreter that only records what it is asked to do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

RECORDER = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
    --version) echo "Python $FAKE_VERSION" ;;
    *version_info*) [ "$FAKE_VERSION" = 3.12.1 ] ;;
    '-m venv --clear .venv')
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate
        printf '#!/bin/sh\\necho outpace "$@"\\n' >.venv/bin/outpace
        chmod +x .venv/bin/outpace ;;
esac
"""


def checkout(folder: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    return folder


def quickstart(folder: Path, version: str, *options: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "FAKE_VERSION": version,
    }
    return subprocess.run(
        [folder / "scripts" / "quickstart", *options],
        capture_output=True,
        text=True,
        env=environ,
        cwd="/",
        check=False,
    )


def test_types_are_checked_beside_the_tests_and_told_after_them(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for name, does in (("ruff", "exit 0"), ("mypy", "echo 'a.py:1: error'; exit $TYPES")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    environ = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "FAKE_VERSION": "3.12.1",
    }
    for code in (0, 1):
        done = subprocess.run(
            [folder / "scripts" / "test", "-k", "x"], capture_output=True, text=True, cwd="/",
            env={**environ, "TYPES": str(code)}, check=False,
        )  # fmt: skip
        assert done.returncode == code
        said = done.stderr.splitlines()
        assert said.index("── tests") < said.index("── types") < said.index("a.py:1: error")
        assert ("scripts/test: failed: types" in said) == bool(code)
    assert "-m pytest -m not slow -n 3 --dist loadfile -k x" in (folder / "calls").read_text()


def installs(folder: Path) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if "pip install" in line]


def test_quickstart_installs_once_tunes_trains_and_reports(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for _ in range(2):
        done = quickstart(folder, "3.12.1", "--steps", "7")
        assert done.returncode == 0, done.stderr
        tuned, reported = [line.split() for line in done.stderr.splitlines()][-2:]
        (trained,) = [line.split() for line in done.stdout.splitlines()]
        assert tuned[:2] == ["outpace", "tune"] and "7" in tuned and tuned[-2] == "--out"
        run, plan = trained[3], trained[-1]
        assert trained == ["outpace", "train", "--out", run, "--steps", "7", "--plan", plan]
        assert plan == f"{tuned[-1]}/plan.json"
        assert reported[2:4] == [run, f"{tuned[-1]}/tuning.json"]
        assert reported[-1] == f"{run}/report.html"
    (install,) = installs(folder)
    assert "-c constraints.txt -e ." in install


def test_quickstart_reports_on_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for words in (["--out", "mine"], ["--out=mine"]):
        done = quickstart(folder, "3.12.1", *words)
        assert "--out mine/report.html" in done.stderr, done.stderr


def test_quickstart_only_trains_where_it_is_told_how(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for options in (["--plan", "plan.json"], ["--resume", "--out", "r"], ["--lora-rank", "8"],
                    ["--task=classify"], ["--help"]):  # fmt: skip
        done = quickstart(folder, "3.12.1", *options)
        assert done.stdout == f"outpace train {' '.join(options)}\n"


def test_quickstart_installs_again_when_the_pins_change(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    quickstart(folder, "3.12.1")
    with (folder / "constraints.txt").open("a") as file:
        file.write("left-pad==1.0\n")
    quickstart(folder, "3.12.1")
    assert len(installs(folder)) == 2


def test_what_docs_installs_is_enough_to_run(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for level, installed in (("run", 1), ("docs", 2), ("run", 2), ("docs", 2), ("test", 3),
                             ("docs", 3), ("run", 3)):  # fmt: skip
        call = f". scripts/setup; system_packages() {{ :; }}; setup {level}"
        environ = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(folder / "calls"),
            "FAKE_VERSION": "3.12.1",
        }
        subprocess.run(["/bin/sh", "-euc", call], env=environ, cwd=folder, check=True)
        assert len(installs(folder)) == installed, level


def test_docs_installs_the_generator_and_passes_options_on(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    environ = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "FAKE_VERSION": "3.12.1",
    }
    for words in (["--build"], ["--dev-addr", "localhost:1"]):
        subprocess.run([folder / "scripts" / "docs", *words], env=environ, cwd="/", check=True)
    (install,) = installs(folder)
    assert "-c constraints.txt -e .[docs]" in install
    calls = (folder / "calls").read_text()
    assert "-m zensical build --clean --strict\n" in calls
    assert "-m zensical serve --dev-addr localhost:1\n" in calls


def test_an_old_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    # Without the machine's own pythons: only the recorder, and the tools that the script needs.
    for tool in ("sh", "dirname", "cat", "cksum", "cp", "grep", "mkdir", "rm"):
        found = shutil.which(tool)
        assert found is not None
        (folder / "bin" / tool).symlink_to(found)
    done = subprocess.run(
        [folder / "scripts" / "quickstart"],
        capture_output=True,
        text=True,
        env={"PATH": str(folder / "bin"), "CALLS": str(folder / "calls"), "FAKE_VERSION": "3.9.2"},
        check=False,
    )
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (folder / ".venv").exists()


def packages(folder: Path, *tools: str, user: int = 0) -> subprocess.CompletedProcess[str]:
    """`system_packages` where these tools are there, and nothing else."""
    programs = folder / "bin"
    programs.mkdir()
    texts = {"id": f"echo {user}", "apt-get": f'echo "$@" >>{folder / "calls"}'}
    for tool in ("id", *tools):
        (programs / tool).write_text(f"#!/bin/sh\n{texts.get(tool, '')}\n")
        (programs / tool).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", "-euc", f". {ROOT}/scripts/setup; system_packages"],
        capture_output=True,
        text=True,
        env={"PATH": str(programs)},
        check=True,
    )


def test_programs_that_tests_need_are_installed_where_they_can_be(tmp_path: Path) -> None:
    done = packages(tmp_path, "apt-get", "ip", "sshd", "slurmctld", "faketime")
    assert done.stderr == "Installing chromium (this once) …\n"
    _, install = (tmp_path / "calls").read_text().splitlines()
    assert install.startswith("install") and install.endswith(" chromium")


def test_nothing_is_installed_that_is_there(tmp_path: Path) -> None:
    assert (
        packages(tmp_path, "apt-get", "ip", "sshd", "slurmctld", "faketime", "chromium").stderr
        == ""
    )
    assert not (tmp_path / "calls").exists()


def test_what_cannot_be_installed_is_said_loudly(tmp_path: Path) -> None:
    done = packages(tmp_path, "apt-get", user=1000)
    assert (
        "NOT INSTALLED: chromium iproute2 openssh-server" in done.stderr
        and "SKIPPED" in done.stderr
    )
    assert not (tmp_path / "calls").exists()


def test_ci_runs_the_test_script_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (command,) = [line for line in lines if line and not line.startswith("#")]
    assert command == 'exec "$(dirname -- "$0")/../scripts/test"'
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# A Python that makes environments of itself, and notes what it is asked to do in them.
TRIED = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
    *ensurepip*) exit 0 ;;
    *version_info\\[*) echo python3.12 ;;
    *version_info*) [ "${0##*/}" != python3.9 ] ;;
    '-m venv --clear '*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    -) exec "$REAL_PYTHON" - ;;
    benchmarks/*) echo "PYTHONPATH=$PYTHONPATH" >>"$CALLS"; exit 1 ;;
esac
"""


def try_torch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "CALLS": str(folder / "calls"),
        "REAL_PYTHON": sys.executable,
    }
    return subprocess.run(
        [folder / "scripts" / "test-torch", *words],
        capture_output=True, text=True, env=environ, cwd="/", check=False,
    )  # fmt: skip


def test_test_torch_makes_an_environment_once_and_passes_on_what_came_out(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for name in ("python3.12", "python3.9"):
        (folder / "bin" / name).write_text(TRIED)
        (folder / "bin" / name).chmod(0o755)
    asked = ("2.11.0", "--python", "python3.12", "--transformers", "5.17.0", "--quick")
    for _ in range(2):
        assert try_torch(folder, *asked).returncode == 1  # as what it runs
    calls = (folder / "calls").read_text()
    made = folder / ".venv-torch-2.11.0-python3.12"
    assert calls.count("-m pip install") == calls.count("-m venv") == 1
    run = f"benchmarks/torch_versions.py --recorded-as scripts/test-torch {' '.join(asked)} --quick"
    assert calls.count(run) == 2 and calls.count(f"PYTHONPATH={folder}\n") == 2
    wanted = (made / "requirements.txt").read_text().splitlines()
    assert wanted[-2:] == ["transformers==5.17.0", "torch==2.11.0"]
    needed = {re.split(r"\W", line)[0] for line in wanted}
    assert needed > {
        "pydantic",
        "pytest",
        "torchao",
        "wandb",
        "tensorboard",
        "mlflow",
        "bitsandbytes",
    }
    assert not needed & {"atheris", "mypy", "ruff"}
    pinned = {line.split("==")[0] for line in (made / "constraints.txt").read_text().splitlines()}
    assert "pydantic" in pinned and not pinned & {"torch", "setuptools", "transformers", "numpy"}

    try_torch(folder, *asked[:3], "--remove")
    assert not made.exists()


def test_test_torch_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    (folder / "bin" / "python3.9").write_text(TRIED)
    (folder / "bin" / "python3.9").chmod(0o755)
    for words in ((), ("--quick",), ("2.11.0", "--python")):
        done = try_torch(folder, *words)
        assert done.returncode == 2 and done.stderr.startswith("usage: scripts/test-torch VERSION")
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (folder / "bin" / name).write_text(TRIED)
    done = try_torch(folder, "2.11.0", "--python", "python3.9")
    assert done.returncode == 2 and "python3.9 is no Python 3.11 or newer" in done.stderr
