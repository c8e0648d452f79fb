"""Random numbers of pipeline stages that do not depend on the order in which the stages run.

When a stage of a custom model starts a micro-batch, it seeds the generators with the rank's key for
the step, the stage number and the micro-batch number. All stages run the code outside blocks. If a
stage needs random numbers that this code draws before the stage's first block, all stages share one
key and reseed after each block, so that this code draws the same numbers on all of them. With these
keys, the plain module also draws the same numbers. Results with dropout can therefore be compared,
and the check of the first batch can be the first step.
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
    """Seeding of the random generators for this rank's pipeline stages.

    A key that is drawn once per step gives the seeds of all its micro-batches. `drawn`: whether the
    forward of any of these stages has drawn random numbers. `shared`: whether all stages in `group`
    use the same key, and seed again after each block.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.drawn = self.shared = False
        self._device, self._group = device, group
        self._key: int | None = None
        self._first = 0
        self._seen: tuple[Any, ...] | None = None

    def watch(self) -> None:
        """Record the generators' states, for `note` to compare."""
        self._seen = random_state(self._device)

    def note(self) -> bool:
        """Stop watching; return and record whether random numbers were drawn since `watch`."""
        if self._seen is None:
            return False
        drew = not same_random_state(self._seen, random_state(self._device))
        self.drawn |= drew
        self._seen = None
        return drew

    def peek(self) -> int | None:
        """Return the key for seeds that the next `step` will draw; None if it will draw none."""
        if not (self.drawn or self.shared):
            return None
        held = torch.get_rng_state()
        key = _draw_key()
        torch.set_rng_state(held)
        return key

    @contextmanager
    def step(self) -> Iterator[None]:
        """Draw the key of a step; on exit, restore the generators to their state after this draw.

        Collective if the key is shared, because it then comes from the first stage's rank.
        """
        if not (self.drawn or self.shared):
            yield
            return
        self._key = self._broadcast_key(_draw_key()) if self.shared else _draw_key()
        after = random_state(self._device)
        try:
            yield
        finally:
            self._key = None
            set_random_state(after, self._device)

    def begin_pass(self, first: int) -> None:
        """Begin a pass; `first` is the number of its first micro-batch within the step."""
        self._first = first

    def seed(self, place: int, micro_batch: int) -> None:
        """Seed all generators for a micro-batch of the pass, at the start of a stage.

        `place` is the stage's index or, if stages share a key, the number of preceding blocks.
        Outside of a step, do nothing.
        """
        if self._key is not None:
            seed_all_generators(self._device, self._key, place, self._first + micro_batch)

    def _broadcast_key(self, key: int) -> int:
        shared = torch.tensor(key, device=self._device)
        dist.broadcast(shared, group=self._group, group_src=0)
        return int(shared)


class PlainDraws:
    """Seeding of a module without a strategy, so that it draws the numbers of a pipeline.

    A place is where a pipeline seeds its generators: the start of a stage or of a block. `keys` has
    the key for the seeds at each place, or None where nothing is seeded. `ends` maps a block's name
    to the place that begins after the block. `drew`: whether random numbers were drawn.
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
        """Seed the generators after the forward of each block in `ends`, inside the context."""
        with ExitStack() as stack:
            for name, place in self._ends.items():
                block = model.get_submodule(name)
                stack.callback(_restore_forward, block, vars(block).get("forward"))
                block.forward = partial(self._run_and_seed, block.forward, place)
            yield

    def begin(self, number: int) -> None:
        """Seed for a new micro-batch; `number` is its number within the step."""
        self._number = number
        self._seed(0)

    def note(self) -> None:
        """Record whether random numbers were drawn since the last seeding."""
        if self._seen is not None:
            self.drew |= not same_random_state(self._seen, random_state(self._device))

    def _run_and_seed(
        self, forward: Callable[..., Any], place: int, /, *args: Any, **kwargs: Any
    ) -> Any:
        made = forward(*args, **kwargs)
        self._seed(place)
        return made

    def _seed(self, place: int) -> None:
        self.note()
        key = self._keys[place]
        if key is not None:
            seed_all_generators(self._device, key, place, self._number)
        self._seen = random_state(self._device)


def _restore_forward(block: nn.Module, forward: Any) -> None:
    if forward is None:
        del block.forward
    else:
        block.forward = forward


def _draw_key() -> int:
    return int(torch.randint(2**62, ()))
