"""One reader under atheris, which keeps bytes that reach more of it and changes them further.

    python benchmarks/fuzz_bytes.py tokens 20

`benchmarks/fuzz.py` calls this with a reader's name and its time limit in seconds.
"""

import sys
import tempfile
from pathlib import Path

FUZZ = Path(__file__).resolve().parents[1] / "tests" / "fuzz"
# Readers that parse bytes themselves, and the file that arbitrary bytes replace.
GUIDED = {"hosts": "hosts", "topology": "topology.txt", "tokens": "tokens.idx",
          "rows": "data.jsonl", "config": "config.toml", "spec": "model.json"}  # fmt: skip


def main() -> None:
    import atheris

    name, seconds = sys.argv[1:]
    sys.path.insert(0, str(FUZZ))
    with atheris.instrument_imports(include=["outpace"]):
        from law import checked
        from readers import READERS

        reader, file = READERS[name], GUIDED[name]
        whole = [tree for tree in reader.trees() if file in tree]
        for tree in whole:
            checked(reader, tree)  # imports what it needs

    def each(data: bytes) -> None:
        checked(reader, {**whole[0], file: data})

    with tempfile.TemporaryDirectory() as seeds:
        for number, tree in enumerate(whole):
            (Path(seeds) / str(number)).write_bytes(tree[file])
        words = [sys.argv[0], seeds, f"-max_total_time={seconds}", "-max_len=4096",
                 "-print_final_stats=1", "-seed=1", "-rss_limit_mb=0"]  # fmt: skip
        atheris.Setup(words, each)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
