"""The verdict in the ranks' store on which rank keeps the others waiting.

After a long wait, a rank queries all ranks, and records which one has not arrived. This verdict is
provisional, since the late rank may still arrive. It becomes final once a rank ends because of it.
Until then, it is ignored if its author is lost or no longer waits.
"""

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from outpace.records.base import Record

_KEY = "verdict"
_NONE = "none"


class HangVerdict(Record):
    """A verdict on a hang: the ranks that keep others waiting (`blamed`), and a sentence on them.

    `by`: the rank that wrote the verdict. `number`: the number of the query of all ranks that led
    to it; 0 without a query. `final`: whether the verdict is about to end ranks.
    """

    sentence: str
    by: int
    blamed: tuple[int, ...]
    number: int = 0
    final: bool = False


class HangVerdicts:
    """Access to the single verdict on a hang, which all ranks share in the store.

    The verdict is read and replaced atomically. Reads never block, so a rank cannot hang on a key
    that another rank deleted, or never wrote because it died.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> HangVerdict | None:
        """Return the current verdict."""
        return _parse(self._store.compare_set(_KEY, "", _NONE))

    def replace(self, known: HangVerdict | None, new: HangVerdict | None) -> HangVerdict | None:
        """Replace the stored verdict with `new` if it still equals `known`.

        Returns the verdict that is stored afterwards. None stands for no verdict.
        """
        return _parse(self._store.compare_set(_KEY, _serialize(known), _serialize(new)))

    def write(self, new: HangVerdict, unless: Callable[[HangVerdict], bool]) -> HangVerdict:
        """Write `new`, and return the verdict that is then stored.

        A stored verdict for which `unless` returns True is kept.
        """
        known = self.read()
        while known is None or not unless(known):
            found = self.replace(known, new)
            if found == new:
                return new
            known = found
        return known

    def finalize(self, verdict: HangVerdict) -> HangVerdict | None:
        """Mark `verdict` as final, just before it ends this rank.

        If another rank has replaced or removed `verdict`, the store stays unchanged. Returns the
        stored verdict if it is final, otherwise None.
        """
        final = verdict.model_copy(update={"final": True})
        found = self.replace(verdict, final)
        return found if found is not None and found.final else None


def _serialize(verdict: HangVerdict | None) -> str:
    return _NONE if verdict is None else verdict.model_dump_json()


def _parse(value: bytes) -> HangVerdict | None:
    text = value.decode()
    return None if text == _NONE else HangVerdict.model_validate_json(text)
