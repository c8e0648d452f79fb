"""Arguments of Megatron-LM's functional tests, from each test's model_config.yaml.

    python benchmarks/megatron_tests.py CLONE    # of NVIDIA/Megatron-LM

The names of tests show neither which implementation they run ("_te_" is in some without Transformer
Engine, and is missing in some with it) nor how large their experts are.
"""

import argparse
import csv
import re
import subprocess
from pathlib import Path

COMMIT = "d98e8a64dd"
TABLE = Path(__file__).parent / "data" / "megatron-tests.csv"
_FOLDER = "tests/functional_tests/test_cases/"
# Columns, by the argument that they contain.
COLUMNS = {
    "transformer_impl": "--transformer-impl",
    "attention_backend": "--attention-backend",
    "experts": "--num-experts",
    "topk": "--moe-router-topk",
    "expert_width": "--moe-ffn-hidden-size",
    "shared_width": "--moe-shared-expert-intermediate-size",
    "layer_freq": "--moe-layer-freq",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "ffn": "--ffn-hidden-size",
    "kv_groups": "--num-query-groups",
    "swiglu": "--swiglu",
}


def _git(clone: str, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", clone, *words], capture_output=True, text=True, check=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone")
    clone = parser.parse_args().clone
    found = []
    for path in _git(clone, "ls-tree", "-r", "--name-only", COMMIT, _FOLDER).split():
        if path.endswith("/model_config.yaml"):
            text = _git(clone, "show", f"{COMMIT}:{path}")
            row = {"model": path.removeprefix(_FOLDER).removesuffix("/model_config.yaml")}
            for column, argument in COLUMNS.items():
                stated = re.search(rf"^ *{argument}: *([^#\n]*)", text, re.MULTILINE)
                row[column] = stated[1].strip().strip("'\"") if stated else ""
            found.append(row)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["model", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
