"""A generated data set of sentence pairs like MRPC, for trying a classifier without real data.

As in the Microsoft Research Paraphrase Corpus (Dolan and Brockett, IWP 2005), the label is 1 if
both sentences mean the same (two thirds of all pairs) and 0 otherwise. In half of the pairs
labelled 0, the second sentence says that the opposite happened, which a model learns slowly. In the
other half, the second sentence denies the first in other words, which a model learns quickly.
"""

from collections.abc import Iterator

import numpy as np

from outpace.data.row import Row

NAME = "paraphrases"
COLUMNS = ("sentence1", "sentence2", "label")
SIZES = {"train": 3668, "validation": 408}  # MRPC's sizes
_SEED = {"train": 1, "validation": 2}
_SAME, _DENIED = 0.67, 0.5

_WHO = ("Acme", "Borealis", "Cobalt", "Delta Air", "Everest", "Fathom", "Granite", "Helios")
_WHAT = ("shares", "profit", "sales", "output", "exports", "revenue")
_MOVES = (
    ("fell", "dropped", "declined", "slipped", "sank", "decreased"),
    ("rose", "climbed", "gained", "advanced", "jumped", "increased"),
)
_WHEN = ("on Monday", "on Friday", "this week", "last month", "in May", "in the third quarter")
_FIRST = "{who} said its {what} {move} {number} percent {when} ."
_DENIALS = ("Analysts doubted that", "It is not true that", "The company denied that")
_SECOND = (
    "{when} the {what} of {who} {move} by {number} percent .",
    "The {what} of {who} {move} {number} percent {when} , the company said .",
)


def paraphrases(split: str) -> Iterator[Row]:
    """Yield a split's pairs of sentences, labelled as paraphrases or not.

    Every call yields the same pairs.
    """
    draw = np.random.Generator(np.random.Philox(_SEED[split]))

    def choose(choices: tuple[str, ...]) -> str:
        return choices[int(draw.integers(len(choices)))]

    for number in range(1, SIZES[split] + 1):
        said = {"who": choose(_WHO), "what": choose(_WHAT), "when": choose(_WHEN)}
        said["number"] = str(draw.integers(1, 10))
        up, same = int(draw.integers(2)), draw.random() < _SAME
        denied = not same and draw.random() < _DENIED
        first = _FIRST.format(move=choose(_MOVES[up]), **said)
        other = up if same or denied else 1 - up
        second = choose(_SECOND).format(move=choose(_MOVES[other]), **said)
        if denied:
            second = f"{choose(_DENIALS)} {second[0].lower()}{second[1:]}"
        second = second[0].upper() + second[1:]
        values = {"sentence1": first, "sentence2": second, "label": int(same)}
        yield Row(values, f"{NAME}, {split}, pair {number}")
