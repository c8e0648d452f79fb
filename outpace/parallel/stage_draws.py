"""Random numbers of a pipeline's stages, by stage and micro-batch, in any order of execution.

When a stage of a custom model starts on a micro-batch, generators are seeded with its rank's key
for the step, the stage number and the micro-batch number. All stages run the code outside of
blocks. If a stage reads numbers that this code draws before the stage begins, all stages share one
key and seed after each block, so that all of them draw the same numbers there. With these keys, the
plain module draws the same numbers too, so results with dropout can be compared, and the check of
the first batch can be the first step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outpace.data.seeding import seed_all_generators
from outpace.parallel.plain import random_state, same_random_state, set_random_state


class StageDraws:
    """Seeds of this rank's stages. `drawn`: any of their forwards has drawn random numbers.

    `shared`: all stages in `group` share one key and seed after each block.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.drawn = self.shared = False
        self._device, self._group = device, group
        self._key: int | None = None
        self._first = 0
        self._seen: tuple[Any, ...] | None = None

    def watch(self) -> None:
        """Start watching the generators, until `note`."""
        self._seen = random_state(self._device)

    def note(self) -> bool:
        """Return and record whether numbers were drawn since `watch`, and stop watching."""
        if self._seen is None:
            return False
        drew = not same_random_state(self._seen, random_state(self._device))
        self.drawn |= drew
        self._seen = None
        return drew

    def peek(self) -> int | None:
        """Return this rank's next key; None if nothing is drawn."""
        if not (self.drawn or self.shared):
            return None
        held = torch.get_rng_state()
        key = _draw_key()
        torch.set_rng_state(held)
        return key

    @contextmanager
    def step(self) -> Iterator[None]:
        """Draw the key of a step. On exit, generators are in the state after this draw.

        A shared key comes from the first stage's rank; the call is then collective.
        """
        if not (self.drawn or self.shared):
            yield
            return
        self._key = self._share(_draw_key()) if self.shared else _draw_key()
        after = random_state(self._device)
        try:
            yield
        finally:
            self._key = None
            set_random_state(after, self._device)

    def begin_pass(self, first: int) -> None:
        """Count micro-batches from `first`, the number of the next pass's first micro-batch."""
        self._first = first

    def seed(self, place: int, micro_batch: int) -> None:
        """Seed random numbers for a micro-batch of a pass, at the start of stage `place`.

        With a shared key, `place` is the number of blocks that came before. This does nothing
        between steps.
        """
        if self._key is not None:
            seed_all_generators(self._device, self._key, place, self._first + micro_batch)

    def _share(self, key: int) -> int:
        """Return the key of the first rank. Collective."""
        shared = torch.tensor(key, device=self._device)
        dist.broadcast(shared, group=self._group, group_src=0)
        return int(shared)


class PlainDraws:
    """Seeds of all stages, for a plain module that runs through all of them.

    `keys` has the key of each place; None if nothing is drawn or seeded there. `ends` maps
    blocks to the number of the place that begins after them. `drew`: numbers were drawn.
    """

    def __init__(
        self, keys: Sequence[int | None], ends: Mapping[str, int], device: torch.device
    ) -> None:
        self.drew = False
        self._keys, self._ends, self._device = keys, ends, device
        self._number = 0
        self._seen: tuple[Any, ...] | None = None

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator[None]:
        """Reseed after each block that comes before a place, as the forward proceeds."""
        with ExitStack() as stack:
            for name, place in self._ends.items():
                block = model.get_submodule(name)
                stack.callback(_put_back_forward, block, vars(block).get("forward"))
                block.forward = partial(self._run, block.forward, place)
            yield

    def begin(self, number: int) -> None:
        """Begin a micro-batch, given its number in the step."""
        self._number = number
        self._seed(0)

    def note(self) -> None:
        """Record whether numbers were drawn since the last seed."""
        if self._seen is not None:
            self.drew |= not same_random_state(self._seen, random_state(self._device))

    def _run(self, forward: Callable[..., Any], place: int, /, *args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        self._seed(place)
        return made

    def _seed(self, place: int) -> None:
        self.note()
        key = self._keys[place]
        if key is not None:
            seed_all_generators(self._device, key, place, self._number)
        self._seen = random_state(self._device)


def _put_back_forward(block: nn.Module, forward: Any) -> None:
    if forward is None:
        del block.forward
    else:
        block.forward = forward


def _draw_key() -> int:
    return int(torch.randint(2**62, ()))
