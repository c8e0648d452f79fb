"""The verdict in the store where ranks met: which rank holds the others up.

A rank that has waited for long asks all how they stand, and writes down which one does not come.
Nobody ends by that yet: the rank may be slow, and come. The verdict is final once a rank ends by
it. One that is not final is of no use to others after the rank that asked is lost, or has stopped
waiting.
"""

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from outpace.records.base import Record

_KEY = "verdict"
_NONE = "none"


class HangVerdict(Record):
    """`by`: the rank that asked, and `number` which question it was; 0 without one.

    `blamed`: ranks.
    """

    sentence: str
    by: int
    blamed: tuple[int, ...]
    number: int = 0
    final: bool = False


class HangVerdicts:
    """The one verdict of a store, which is read and replaced in one operation each.

    So no rank waits for a key that another one has deleted, or has died before it wrote.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> HangVerdict | None:
        """Give the verdict that is there now."""
        return _parse(self._store.compare_set(_KEY, "", _NONE))

    def replace(self, known: HangVerdict | None, new: HangVerdict | None) -> HangVerdict | None:
        """Put `new` in the place of `known`, which was read; give what is there then.

        That is another rank's verdict where that rank was quicker.
        """
        return _parse(self._store.compare_set(_KEY, _text(known), _text(new)))

    def put(self, new: HangVerdict, unless: Callable[[HangVerdict], bool]) -> HangVerdict:
        """Write a verdict, unless one is there that prevents it; give what is there then."""
        known = self.read()
        while known is None or not unless(known):
            found = self.replace(known, new)
            if found == new:
                return new
            known = found
        return known

    def settle(self, verdict: HangVerdict) -> HangVerdict | None:
        """Make a verdict final, as this rank ends by it; give the final one, if there is one."""
        final = verdict.model_copy(update={"final": True})
        found = self.replace(verdict, final)
        return found if found is not None and found.final else None


def _text(verdict: HangVerdict | None) -> str:
    return _NONE if verdict is None else verdict.model_dump_json()


def _parse(value: bytes) -> HangVerdict | None:
    text = value.decode()
    return None if text == _NONE else HangVerdict.model_validate_json(text)
