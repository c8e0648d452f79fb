"""Saving and loading of a rank's part of a custom model, which its stages run as copies."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outpace.nn.extra_state import EXTRA_STATE, pack, parts_with_extra_state, unpack
from outpace.parallel.custom.stage import CustomStage
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.tensors import save_held_alone


def drop_buffers(blocks: Sequence[nn.Module], mine: Collection[int]) -> None:
    """Remove the buffers of blocks that other ranks run, because those ranks save and load them."""
    kept = {part for number in mine for part in blocks[number].modules()}
    for number, block in enumerate(blocks):
        for part in () if number in mine else block.modules():
            if part not in kept:
                part._buffers.update(dict.fromkeys(part._buffers))
                save_held_alone(part)


class StageExtraState:
    """Extra state (`get_extra_state`) of this rank's stages, in checkpoints of the module `held`.

    The stage that runs a block saves the block's state. Each stage runs the code outside of blocks
    only as far as its blocks need; only the last of `count` stages runs all of this code, so the
    last one saves the state outside of blocks.
    """

    def __init__(
        self, held: nn.Module, stages: Mapping[int, CustomStage], names: Sequence[str], count: int
    ) -> None:
        self._outside: dict[str, list[nn.Module]] = {}
        self._saves = count - 1 in stages
        for name, part in parts_with_extra_state(held):
            number = next((n for n, b in enumerate(names) if f"{name}.".startswith(f"{b}.")), None)
            runs = [s for s in stages.values() if number is None or number in s.mine]
            copies = [s.objective.model.get_submodule(name) for s in runs]  # type: ignore[union-attr]
            if number is None:
                self._outside[name] = copies
                if not self._saves:
                    save_held_alone(part)
                    continue
            if copies:
                vars(part).update(
                    get_extra_state=copies[-1].get_extra_state,
                    set_extra_state=copies[-1].set_extra_state,
                )

    def share(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Copy the last stage's state outside of blocks to all stages. Collective."""
        mine: dict[str, Any] = {}
        for name, copies in self._outside.items() if self._saves else ():
            mine[f"{name}.{EXTRA_STATE}"] = copies[-1].get_extra_state()
        told = gather_objects(pack(mine), group)
        state = next((one for one in told if one), {})
        for name, value in unpack(state, device).items():
            for part in self._outside[name.removesuffix(f".{EXTRA_STATE}")]:
                part.set_extra_state(value)
