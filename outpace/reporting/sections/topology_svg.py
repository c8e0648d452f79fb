"""A topology as a picture: GPUs in a circle, the link of every pair, network cards outside."""

import math
from html import escape
from itertools import combinations

from outpace.records.topology import (
    CpuTopology,
    Placement,
    Topology,
    cpu_set,
    goodness,
    meaning,
    nvlinks,
)
from outpace.records.units import show_bytes
from outpace.reporting.charts.palette import BLUE, GREEN, LIGHT_GREY, ORANGE, PINK, RED, SKY
from outpace.reporting.terminal.topology import advice

_COLOURS = {"NV": GREEN, "PIX": BLUE, "PXB": SKY, "PHB": ORANGE, "NODE": PINK, "SYS": RED,
            "SOC": RED}  # fmt: skip
_DASHES = {"PHB": "6 4", "NODE": "6 4", "SYS": "2 5", "SOC": "2 5"}
_INK = "#1A1F26"  # colour of words in boxes, which are light even on dark pages
_NUMA = ("#EAF3FA", "#FDF3DF", "#E6F5EF", "#F9ECF3")
_CENTRE, _RADIUS, _OUTSIDE = (330, 330), 190, 268
_WIDTH, _TEXT_AT, _LINE = 1060, 650, 19


def topology_svg(topology: Topology, placement: Placement) -> str:
    """Return an SVG drawing of the links between devices, with a legend.

    Below it is advice on where to place ranks (`placement`).
    """
    gpus = topology.gpus
    angle = {gpu: -math.pi / 2 + 2 * math.pi * at / len(gpus) for at, gpu in enumerate(gpus)}
    parts = []
    for one, other in combinations(gpus, 2):
        parts.append(
            _line(_point(angle[one]), _point(angle[other]), topology.link_between(one, other))
        )
    parts += _draw_nics(topology, placement, angle)
    for gpu in gpus:
        parts.append(_draw_gpu(topology, gpu, _point(angle[gpu])))
    side, height = _draw_legend(topology, placement)
    return _svg_document([*parts, *side], max(660, height))


def _point(angle: float, radius: float = _RADIUS) -> tuple[float, float]:
    return _CENTRE[0] + radius * math.cos(angle), _CENTRE[1] + radius * math.sin(angle)


def _link_colour(link: str | None) -> str:
    return LIGHT_GREY if link is None else _COLOURS["NV" if nvlinks(link) else link]


def _line(a: tuple[float, float], b: tuple[float, float], link: str | None) -> str:
    width = min(1.2 + 0.6 * nvlinks(link), 5) if nvlinks(link) else 1.6
    dash = f' stroke-dasharray="{_DASHES[link]}"' if link in _DASHES else ""
    return (
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" '
        f'stroke="{_link_colour(link)}" stroke-width="{width:.1f}"{dash} stroke-opacity="0.8">'
        f"<title>{link or 'n/a'}</title></line>"
    )


def _draw_gpu(topology: Topology, gpu: str, at: tuple[float, float]) -> str:
    device = topology.device(gpu)
    numa = device.numa_affinity
    nodes = sorted({d.numa_affinity for d in topology.devices if d.numa_affinity})
    fill = _NUMA[nodes.index(numa) % len(_NUMA)] if numa else "#F4F4F4"
    below = f"NUMA {numa}" if numa else ""
    name = _text(at[0], at[1] - (2 if below else -5), gpu, 14, "middle", bold=True, ink=_INK)
    words = _text(at[0], at[1] + 14, below, 11, "middle", ink=_INK) if below else ""
    return (
        f'<rect x="{at[0] - 34:.1f}" y="{at[1] - 20:.1f}" width="68" height="40" rx="6" '
        f'fill="{fill}" stroke="#333"/>{name}{words}'
    )


def _draw_nics(topology: Topology, placement: Placement, angle: dict[str, float]) -> list[str]:
    """Draw network cards next to their nearest GPUs, and connect them by lines.

    Cards that are near no GPU are drawn where there is room. `angle` is the direction of each GPU.
    """
    near: dict[tuple[str, ...], list[str]] = {}
    for one in placement.nics:
        if one.link not in ("SYS", "SOC", None):
            near.setdefault(one.nics, []).append(one.gpu)
    places = {nics: _mean_angle([angle[gpu] for gpu in gpus]) for nics, gpus in near.items()}
    drawn = {nic for nics in near for nic in nics}
    rest = tuple(nic for nic in topology.nics if nic not in drawn)
    if rest:
        places[rest] = _widest_gap(list(places.values()))
        near[rest] = []
    for one in placement.nics:
        if one.link in ("SYS", "SOC"):
            near[next(nics for nics in near if set(nics) & set(one.nics))].append(one.gpu)
    edges = [
        _line(_point(places[nics], _OUTSIDE), _point(angle[gpu]), _best_link(topology, gpu, nics))
        for nics, gpus in near.items()
        for gpu in gpus
    ]
    return edges + [part for nics, at in places.items() for part in _draw_cards(nics, at)]


def _best_link(topology: Topology, gpu: str, nics: tuple[str, ...]) -> str | None:
    return max((topology.link_between(gpu, nic) for nic in nics), key=goodness)


def _mean_angle(angles: list[float]) -> float:
    """Return the mean of angles as directions, or the first angle if they cancel out."""
    x, y = sum(map(math.cos, angles)), sum(map(math.sin, angles))
    return math.atan2(y, x) if math.hypot(x, y) > 1e-6 else angles[0]


def _widest_gap(taken: list[float]) -> float:
    """Return the middle of the widest gap between angles.

    Without any angles, return pi / 2, which is below the centre.
    """
    around = sorted(angle % (2 * math.pi) for angle in taken)
    if not around:
        return math.pi / 2
    ends = [*around[1:], around[0] + 2 * math.pi]
    begin, end = max(zip(around, ends, strict=True), key=lambda gap: gap[1] - gap[0])
    return (begin + end) / 2


def _draw_cards(nics: tuple[str, ...], angle: float) -> list[str]:
    at = _point(angle, _OUTSIDE)
    lines = [*nics[:2], *([f"+ {len(nics) - 2}"] if len(nics) > 2 else [])]
    high = 14 * len(lines) + 6
    return [
        f'<rect x="{at[0] - 29:.1f}" y="{at[1] - high / 2:.1f}" width="58" height="{high}" '
        'rx="3" fill="#FFF" stroke="#777"/>',
        *(
            _text(at[0], at[1] - high / 2 + 14 * (row + 1), line, 11, "middle", ink=_INK)
            for row, line in enumerate(lines)
        ),
    ]


def _draw_legend(topology: Topology, placement: Placement) -> tuple[list[str], int]:
    """Draw the title, a legend with the number of pairs per link, and advice.

    Also returns the height of the drawing.
    """
    counts: dict[str, int] = {}
    for pair in combinations(topology.gpus, 2):
        link = topology.link_between(*pair) or "n/a"
        counts[link] = counts.get(link, 0) + 1
    y = 40
    parts = [
        _text(
            _TEXT_AT,
            y,
            f"{len(topology.gpus)} GPUs, {len(topology.nics)} network cards",
            17,
            bold=True,
        )
    ]
    for link, count in sorted(counts.items(), key=lambda item: -nvlinks(item[0])):
        y += 28
        parts.append(
            _line((_TEXT_AT, y - 5), (_TEXT_AT + 36, y - 5), None if link == "n/a" else link)
        )
        of = meaning(None if link == "n/a" else link)
        words = f"{link}: {count} pair{'s' if count > 1 else ''}, {of}"
        rows = _wrap_lines(words, 40)
        parts += [_text(_TEXT_AT + 46, y + 15 * row, line, 13) for row, line in enumerate(rows)]
        y += 15 * (len(rows) - 1)
    for link in sorted({one.link for one in placement.nics if one.link} - set(counts)):
        y += 28
        parts.append(_line((_TEXT_AT, y - 5), (_TEXT_AT + 36, y - 5), link))
        parts.append(_text(_TEXT_AT + 46, y, f"{link}: to the nearest network card", 13))
    y += 18
    for sentence in advice(placement, topology):
        y += 8
        for line in _wrap_lines(sentence, 48):
            y += _LINE
            parts.append(_text(_TEXT_AT, y, line, 13))
    return parts, y + 30


def _wrap_lines(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _text(
    x: float, y: float, words: str, size: int, anchor: str = "start", bold: bool = False,
    ink: str = "currentColor",
) -> str:  # fmt: skip
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{ink}"{weight}>{escape(words)}</text>'
    )


def _svg_document(parts: list[str], height: float) -> str:
    """Join elements to an SVG document with a white background.

    The background is of class `paper`, so that the style of a page around the drawing can hide it.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        '<rect class="paper" width="100%" height="100%" fill="#FFF"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def cpu_svg(cpu: CpuTopology) -> str:
    """Return an SVG with a box per NUMA node and its cores; with SMT, two CPUs per core."""
    cores = cpu.siblings or tuple(str(one) for one in sorted(cpu_set(cpu.cpus)))
    boxes = [(f"NUMA node {node.number}", node.cpus, node.memory_bytes) for node in cpu.numa]
    parts, y = (
        [_text(30, 40, f"{cpu.cpu_count} CPUs, {len(cores)} cores", 17, bold=True)],
        60.0,
    )
    for title, cpus, memory in boxes or [("CPUs", cpu.cpus, None)]:
        mine = [core for core in cores if cpu_set(core) & cpu_set(cpus)]
        rows = -(-len(mine) // 16) or 1
        high = 40 + 34 * rows
        parts.append(
            f'<rect x="30" y="{y:.0f}" width="{_WIDTH - 60}" height="{high}" rx="6" '
            'fill="#EAF3FA" stroke="#333"/>'
        )
        about = f"{title}: CPUs {cpus}" + (f", {show_bytes(memory)}" if memory else "")
        parts.append(_text(44, y + 24, about, 14, ink=_INK))
        for at, core in enumerate(mine):
            x, row = 44 + 57 * (at % 16), y + 36 + 34 * (at // 16)
            parts.append(
                f'<rect x="{x}" y="{row:.0f}" width="52" height="26" rx="3" fill="#FFF" '
                'stroke="#777"/>'
            )
            parts.append(_text(x + 26, row + 17, core, 11, "middle", ink=_INK))
        y += high + 16
    for cache in cpu.caches:
        words = (
            f"L{cache.level} {cache.kind.lower()}: {cache.count} × {show_bytes(cache.cache_bytes)}"
        )
        words += f", each for {cache.shared_by} CPUs" if cache.shared_by > 1 else ""
        parts.append(_text(44, y + 8, words, 13))
        y += _LINE
    return _svg_document(parts, y + 20)
