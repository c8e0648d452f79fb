"""Properties of low precision: range, spacing, swamping, loss scale, bytes moved.

    python benchmarks/low_precision.py            # records results/low_precision.json and a picture
    python benchmarks/low_precision.py --quick    # fewer steps, records nothing

Range and spacing are derived from the bits of each format and checked against torch.finfo.
Swamping: a small number added to a large one is lost if it is less than half the spacing there.
Loss scale: a tiny model is trained in fp16 with torch's GradScaler (Micikevicius et al., ICLR 2018,
§3.2), from a scale that overflows. Bytes, counted, and time are those of an element-wise sum.
"""

import argparse
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from alternating import alternating
from forward_backward import Moved
from torch import nn

PICTURE = Path(__file__).parent.parent / "docs" / "results" / "spacing.svg"
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format by its bits.

    `finite`: no infinities, and only the last mantissa of the highest exponent is NaN (Micikevicius
    et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1).
    """

    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    @property
    def bias(self) -> int:
        """Return the number that is subtracted from the stored exponent."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def largest(self) -> float:
        """Return the largest number."""
        top = 2**self.exponent_bits - 1 - self.bias
        if self.finite:
            return (2.0 - 2.0 ** (1 - self.mantissa_bits)) * 2.0**top
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0 ** (top - 1)

    @property
    def smallest_normal(self) -> float:
        """Return the smallest number with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """Return the smallest positive number."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    def spacing(self, value: float) -> float:
        """Return the distance from |value| to the next number; constant below normal numbers."""
        exponent = math.frexp(abs(value))[1] - 1 if value else 1 - self.bias
        return 2.0 ** (max(exponent, 1 - self.bias) - self.mantissa_bits)


FORMATS = {
    "fp32": Format(8, 23),
    "fp16": Format(5, 10),
    "bf16": Format(8, 7),
    "fp8 e4m3": Format(4, 3, finite=True),
    "fp8 e5m2": Format(5, 2),
}


def agrees(name: str) -> bool:
    """Return whether torch reports the same values for a format."""
    derived, told = FORMATS[name], torch.finfo(DTYPES[name])
    return (derived.largest, derived.smallest_normal, derived.smallest, derived.eps) == (
        told.max, told.smallest_normal, told.smallest_normal * told.eps, told.eps,
    )  # fmt: skip


def formats() -> dict[str, Any]:
    """Return all formats, with their spacing at some magnitudes."""
    return {
        name: {
            **asdict(one),
            "largest": one.largest,
            "smallest_normal": one.smallest_normal,
            "smallest": one.smallest,
            "eps": one.eps,
            "spacing": {str(at): one.spacing(at) for at in (1, 100, 2048) if at <= one.largest},
            "agrees_with_torch": agrees(name),
        }
        for name, one in FORMATS.items()
    }


def swamping() -> dict[str, Any]:
    """Return sums that are lost, and where a sum of ones stops growing."""
    found: dict[str, Any] = {}
    for name in ("fp32", "fp16", "bf16"):
        dtype = DTYPES[name]
        stuck = 2.0 ** (FORMATS[name].mantissa_bits + 1)
        one = torch.tensor(1.0, dtype=dtype)
        large = torch.tensor(stuck, dtype=dtype)
        added = torch.tensor(2048.0, dtype=dtype) + torch.tensor(0.5, dtype=dtype)
        total = torch.zeros((), dtype=dtype)
        for _ in range(10_000):
            total += torch.tensor(0.001, dtype=dtype)
        found[name] = {
            "2048 + 0.5": added.item(),
            "stuck_at": stuck,
            "stuck": bool(large + one == large),
            "grew_until": bool(torch.tensor(stuck - 1, dtype=dtype) + one == stuck),
            "10,000 times 0.001": total.item(),
            "torch.sum of them": torch.full((10_000,), 0.001, dtype=dtype).sum().item(),
        }
    return found


def loss_scale(steps: int, growth_interval: int) -> dict[str, Any]:
    """Return the scale before each step of a small fp16 training run, and the skipped steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=growth_interval)
    x = torch.randn(64, 16)
    y = x[:, :1] * 2
    scales, skipped, losses = [], [], []
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(before)
        skipped.append(scaler.get_scale() < before)
        losses.append(loss.item())
    return {
        "growth_interval": growth_interval,
        "scale": scales,
        "skipped": skipped,
        "loss": losses,
    }


def bytes_moved(elements: int, rounds: int) -> dict[str, Any]:
    """Measure an element-wise sum of two tensors in each dtype that supports addition."""
    pairs = {
        name: (torch.ones(elements, dtype=DTYPES[name]), torch.ones(elements, dtype=DTYPES[name]))
        for name in ("fp32", "fp16", "bf16")
    }
    found: dict[str, Any] = {}
    for name, (left, right) in pairs.items():
        with Moved() as moved:
            left + right
        total = moved.read_bytes + moved.written_bytes
        found[name] = {"bytes_per_element": total / elements}
    times = alternating({name: (lambda p=p: p[0].add(p[1])) for name, p in pairs.items()}, rounds)
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        per_element = found[name]["bytes_per_element"]
        found[name] |= {"seconds": seconds, "bytes_per_s": per_element * elements / middle}
    return found


def draw(path: Path) -> None:
    """Draw spacing over magnitude."""
    from pictures import GRID, write_svg

    traces = []
    for name, one in FORMATS.items():
        low, high = math.log2(one.smallest), math.log2(one.largest)
        at = [2.0**exponent for exponent in range(math.ceil(low), math.floor(high) + 1)]
        spacings = [one.spacing(value) for value in at]
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": at, "y": spacings,
                       "line": {"shape": "vh"}})  # fmt: skip
    powers = {"type": "log", "exponentformat": "power", "dtick": 4, **GRID}
    layout = {"xaxis": {"title": {"text": "magnitude"}, "range": [-12, 12], **powers},
              "yaxis": {"title": {"text": "to the next number"}, "range": [-14, 10], **powers},
              "legend": {"x": 0.02, "y": 0.98}}  # fmt: skip
    write_svg(path, traces, layout, (700, 420))


def main() -> None:
    """Derive, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps; nothing is recorded")
    asked = parser.parse_args()
    found = {
        "formats": formats(),
        "swamping": swamping(),
        "loss_scale": loss_scale(60 if asked.quick else 300, 10 if asked.quick else 40),
        "bytes": bytes_moved(2**16 if asked.quick else 2**25, 2 if asked.quick else 40),
    }
    for name, one in found["formats"].items():
        print(f"{name:9} largest {one['largest']:.4g}, smallest {one['smallest']:.4g}, spacing "
              f"{one['spacing']}, torch agrees: {one['agrees_with_torch']}")  # fmt: skip
    for name, one in found["swamping"].items():
        print(name, one)
    scale = found["loss_scale"]
    print(f"loss scale {scale['scale'][0]:.0f} → {scale['scale'][-1]:.0f}, "
          f"{sum(scale['skipped'])} of {len(scale['scale'])} steps left out")  # fmt: skip
    for name, one in found["bytes"].items():
        print(f"{name}: {one['bytes_per_element']:.0f} B an element, "
              f"{one['bytes_per_s'] / 1e9:.1f} GB/s")  # fmt: skip
    if not asked.quick:
        from recording import save

        draw(PICTURE)
        print(save("low_precision", found))


if __name__ == "__main__":
    main()
