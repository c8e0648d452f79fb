"""Lookup of machines by the names that users, drivers, SLURM and clouds give them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.nodes import NODES
from outpace.records.aliases import translate_alias
from outpace.records.errors import BadInputError, join_or, nearest_of, similar_names, suggest
from outpace.records.hardware import Accelerator, Architecture, Bundle, Node, Topology

_GIB = 2**30


def find_node(name: str) -> Node:
    """Return a machine by its name in the catalog, or by its accelerators' name, count and memory.

    Accepted forms are "RTX 4090", "rtx-4090", "4xrtx-3090", "rtx-3060:12GB", "8xh100", and the
    forms of drivers, SLURM and clouds: "NVIDIA H100 80GB HBM3", "gpu:a100-sxm4-80gb:8", "h100:8",
    "8xH100-80GB", "A6000". A trailing number is a count unless it is one of the chip's memory
    sizes. A count that no single host has is refused with an error that names the options for
    several hosts.

    Cards are assumed to have no bridge, and chips on boards to be linked to each other. If a chip
    is sold both on boards and as a card, the board is assumed, and the result says so.

    Raises BadInputError, which suggests the closest entries, if there is no such machine.
    """
    wanted = _slug(name)
    if found := _find_by_name(name) or _find_other_forms(name, wanted):
        return found
    plain = [_slug(known) for known in ACCELERATORS]
    known = [*NODES, *plain]
    alike = [] if translate_alias(wanted, known)[0] else _list_similar(wanted, plain)
    meant = f" Did you mean {join_or(alike)}?" if alike else _suggest_names(wanted, known, plain)
    raise BadInputError(
        f"machine {name!r} is not in the catalog.{meant} "
        f"It has {nearest_of(wanted, known)}; docs/reference/catalog.md lists all."
    )


def _find_by_name(name: str) -> Node | None:
    """Return the machine of this name, or a machine with the accelerators of this name.

    Returns None if the catalog has neither.
    """
    wanted = _slug(name)
    if wanted in NODES:
        return NODES[wanted]
    counted = _move_count_first(wanted)
    for text in (counted, _to_catalog_form(counted)):
        found = _find_counted(name, text)
        if found is not None:
            return found
    return None


def _suggest_names(wanted: str, known: Sequence[str], chips: Sequence[str]) -> str:
    """Return a hint with similar names of the catalog, or of chips without their boards ("h100").

    A count of chips is kept: "8xh100-sxm" for "8xh100x", and "4xh100" for "4xh1000".
    """
    counted = _COUNT_FIRST.fullmatch(wanted)
    count, word = ("", wanted) if counted is None else (f"{counted[1]}x", counted[2])
    names = [*(f"{count}{_chip_name(chip)}" for chip in chips if counted), *known]
    boards = (_ON_BOARD.fullmatch(_chip_name(chip)) for chip in chips)
    plain = dict.fromkeys(board[1] for board in boards if board)
    meant = [repr(f"{count}{chip}") for chip in similar_names(word, plain)]
    return suggest(f"{count}{word}", names) or (f" Did you mean {join_or(meant)}?" if meant else "")


def _find_counted(name: str, text: str) -> Node | None:
    """Return a host with the accelerators that `text` names ("8xh100:80gb").

    Returns None if the catalog does not have them. `name` is the user's spelling, for messages.
    Raises BadInputError if a required memory size is missing or not sold, or if no single host has
    that many accelerators.
    """
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return None
    count, word, memory = counted.groups()
    request = _MachineName(name, int(count or 1), word, memory)
    chip = _find_variant(request)
    if chip is not None:
        _require_one_host(request, chip)
        return _make_node(text, chip, request.count)
    board = _find_board(request)
    if board is None:
        return None
    _require_one_host(request, board)
    form = _slug(board.name)
    found = _make_node(f"{count}x{form}" if count else form, board, request.count)
    assumed = (
        f"{name} is read as {board.name}, the variant on boards; other variants have their own "
        "names (docs/reference/catalog.md)."
    )
    return found.model_copy(update={"assumed": assumed})


# SLURM's "gpu:a100:8" and "gres/gpu:a100:8", where the last number is the count.
_GRES = re.compile(r"(?:gres/)?gpu:(.+?)(?::([1-9]\d{,9}))?")
_NUMBER_LAST = re.compile(r"([^:]+):([1-9]\d{,9})")
_COUNT_FIRST = re.compile(r"([1-9]\d{,9})-?[x×*]-?(.+)", re.DOTALL)
# Three digits and more only after "h100x": the digits of "rtx4090" are not a count.
_COUNT_LAST = re.compile(r"(.+?)-?[x×*]-?([1-9]\d?|(?<=\d[x×*])[1-9]\d{,9})", re.DOTALL)
_MAKER_WORDS = re.compile(r"^(?:(?:nvidia|tesla|geforce|amd|instinct|radeon|apple)-)+")
_BRAND = re.compile(r"^[rg]tx-")  # "A6000" is the RTX A6000
_KIND_OF_MEMORY = re.compile(r"-(?:hbm\d\w?|gddr\d\w?)$")
_MEMORY_LAST = re.compile(r"(.+?)[-:]?(\d+)-?(?:gb|gib|g)")
_ON_BOARD = re.compile(r"(.+)-sxm\d?")
_MEMORY_FIRST = re.compile(r"(.+?)-(\d+)-?gb-(pcie|sxm\d?)")


def _move_count_first(wanted: str) -> str:
    """Rewrite SLURM's "h100:8" as "8xh100".

    A number that is one of the chip's memory sizes in GB stays: "rtx-3060:12".
    """
    found = _NUMBER_LAST.fullmatch(wanted)
    if found is None or _COUNT_FIRST.fullmatch(wanted):
        return wanted
    form = _to_catalog_form(found[1])
    word, sized, _ = form.partition(":")
    alike = [
        chip for known, chip in ACCELERATORS.items() if f"{_slug(known)}-".startswith(f"{word}-")
    ]
    if not alike:
        return wanted
    sizes = {size for chip in alike for size in (_memory_in_name(chip), chip.memory_bytes // _GIB)}
    number, alone = int(found[2]), len(alike) == 1
    is_size = not sized and (number in sizes or (alone and _has_memory(alike[0], number)))
    return f"{form}:{number}" if is_size else f"{number}x{form}"


def _to_catalog_form(wanted: str) -> str:
    """Rewrite a name as drivers, SLURM or clouds write it in the catalog's form, "8xh100:80gb".

    A driver's full name is replaced by its accelerator's name. In other names, the vendor, memory
    type and socket generation are dropped, and a trailing size is read as memory.
    """
    word, count = wanted.replace("_", "-"), None
    gres = _GRES.fullmatch(word)
    if gres is not None:
        word, count = gres.groups()
    for pattern, places in ((_COUNT_FIRST, (2, 1)), (_COUNT_LAST, (1, 2))):
        match = pattern.fullmatch(word) if count is None else None
        if match is not None:
            word, count = match[places[0]], match[places[1]]
    word = _MAKER_WORDS.sub("", word)
    prefix = "" if count is None else f"{count}x"
    own = _alphanumeric(word)
    same = [one.name for one in ACCELERATORS.values()
            if own in (_alphanumeric(one.driver_name), _alphanumeric(one.name))]  # fmt: skip
    if len(same) == 1:
        return prefix + _slug(same[0])
    word = _KIND_OF_MEMORY.sub("", word)
    inside = _MEMORY_FIRST.fullmatch(word)
    if inside is not None:
        word = f"{inside[1]}-{inside[3]}-{inside[2]}gb"
    memory, sized = "", _MEMORY_LAST.fullmatch(word)
    if sized is not None:
        word, memory = sized[1], f":{sized[2]}gb"
    word = re.sub(r"-sxm\d$", "-sxm", word)
    plain = {_alphanumeric(_BRAND.sub("", _slug(chip))): _slug(chip) for chip in ACCELERATORS}
    plain |= {
        _alphanumeric(one): one for chip in ACCELERATORS for one in (_slug(chip), _chip_name(chip))
    }
    return f"{prefix}{plain.get(_alphanumeric(word), word)}{memory}"


def _chip_name(chip: str) -> str:
    return _SIZED.sub("", _slug(chip))


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@dataclass(frozen=True)
class _MachineName:
    """Accelerators as the user named them.

    `name` is the text as typed; `word` is the chip in it, and `memory` the memory size in GB.
    """

    name: str
    count: int
    word: str
    memory: str | None


# Largest number of accelerators in a host: 16 V100 (DGX-2), 16 A100 (Google Cloud's
# a2-megagpu-16g). Later boards hold 8 (HGX H100 to B300, Instinct MI300X to MI355X platforms),
# racks of superchips more.
_MOST_IN_HOST, _MOST_ON_BOARD = 16, 8
_LATER_BOARDS: tuple[Architecture, ...] = ("hopper", "blackwell", "cdna3", "cdna4")
_MOST_OF = {"GB200": 72, "GB300": 72, "GH200": 32, "GB10": 1}


def _max_per_host(chip: Accelerator) -> int:
    """Return the largest number of these chips in one host; for superchips, in one rack."""
    known = _MOST_OF.get(chip.name.split()[0], None if chip.has_collectives else 1)
    if known is not None:
        return known
    on_board = chip.architecture in _LATER_BOARDS and not _is_card(chip)
    return _MOST_ON_BOARD if on_board else _MOST_IN_HOST


def _require_one_host(request: _MachineName, chip: Accelerator) -> None:
    most = _max_per_host(chip)
    if request.count <= most:
        return
    if not chip.has_collectives:
        raise BadInputError(
            f"machine {request.name!r}: a Mac has one {chip.name}, and torch has no collectives "
            f"for Apple's GPUs, so it trains alone. Name one: --machine {_slug(chip.name)}."
        )
    racks = [
        f"; {node.name} has {node.devices} of {node.accelerator}"
        for node in NODES.values()
        if (node.devices, node.accelerator) == (request.count, f"G{chip.name}")
    ]
    raise BadInputError(
        f"machine {request.name!r}: a host has at most {most} of {chip.name}, not {request.count:,}"
        f"{''.join(racks)}. Name one host and the number of hosts: {_format_hosts(request, chip)}."
        f"{_memory_hint(request, chip)}"
    )


def _memory_hint(request: _MachineName, chip: Accelerator) -> str:
    """Return a hint if the count may be meant as a memory size ("rtx-4090:48"), else ""."""
    last = _NUMBER_LAST.fullmatch(_slug(request.name))
    sizes = {_memory_in_name(one) for one in ACCELERATORS.values()}
    if last is None or int(last[2]) != request.count or request.count not in sizes:
        return ""
    return f" If you mean {request.count} GB of memory: {chip.name} has {_memory_in_name(chip)} GB."


def _format_hosts(request: _MachineName, chip: Accelerator) -> str:
    """Return the options --machine and --nodes for `request.count` chips on several equal hosts.

    The hosts have the usual number of chips, or the next smaller number that divides the count. If
    the catalog has such a machine, its name is used, or else the count and name of the chips.
    """
    usual = _MOST_OF.get(chip.name.split()[0], _MOST_ON_BOARD)
    each = next(n for n in range(usual, 0, -1) if request.count % n == 0)
    known = (one.name for one in NODES.values() if one.accelerator == chip.name)
    name = next((one for one in known if NODES[one].devices == each), f"{each}x{_slug(chip.name)}")
    return f"--machine {name} --nodes {request.count // each}"


def _find_other_forms(name: str, wanted: str) -> Node | None:
    """Return a machine named in a less usual form ("4090x4"); None if there is none.

    For several machines ("128xdgx-h100"), raises BadInputError with the options to use.
    """
    for pattern, places in ((_COUNT_FIRST, (1, 2)), (_COUNT_LAST, (2, 1)), (_NUMBER_LAST, (2, 1))):
        found = pattern.fullmatch(wanted)
        try:
            node = None if found is None else _find_by_name(found[places[1]])
        except BadInputError:
            node = None
        if found is None or node is None:
            continue
        count = int(found[places[0]])
        if count == 1:
            return node
        if node.devices == 1 and node.name not in NODES:
            chip = ACCELERATORS[node.accelerator or ""]
            _require_one_host(_MachineName(name, count, node.name, None), chip)
            return _make_node(f"{count}x{_slug(chip.name)}", chip, count)
        raise BadInputError(
            f"machine {name!r}: --machine names one host. Give the number of hosts with --nodes: "
            f"--machine {node.name} --nodes {count}."
        )
    return None


# "4xrtx-3090", "rtx-3060:12gb", "2xrtx-4060-ti:16".
_COUNTED = re.compile(r"(?:([1-9]\d{,9})-?[x×*]-?)?(.+?)(?::(\d{1,9})-?(?:gb|gib)?)?", re.DOTALL)
# Suffixes of names of models that are sold with several memory sizes.
_SIZED = re.compile(r"-(\d+)-gb\b.*")


def _slug(name: str) -> str:
    return name.casefold().replace(" ", "-")


def _find_variant(request: _MachineName) -> Accelerator | None:
    """Return the accelerator that the user named, in the requested memory size.

    None if the catalog has no accelerator of that name. Raises BadInputError if it is not sold with
    that size, or if it is sold with several sizes and none is given.
    """
    named = {_slug(known): one for known, one in ACCELERATORS.items()}
    word, memory = request.word, request.memory
    if memory is None and word in named:
        return named[word]
    alike = [one for known, one in named.items() if word in (known, _SIZED.sub("", known))]
    sizes = {_memory_in_name(one): one for one in alike}
    held = {one.memory_bytes // _GIB: one for one in alike}
    if memory is not None and int(memory) in {*sizes, *held}:
        return sizes.get(int(memory)) or held[int(memory)]
    if len(alike) == 1 and (memory is None or _has_memory(alike[0], int(memory))):
        return alike[0]
    if not alike:
        return None
    raise _memory_error(request, sizes, "")


def _memory_error(
    request: _MachineName, sizes: Mapping[int, Accelerator], where: str
) -> BadInputError:
    either = join_or(f"{size} GB" for size in sorted(sizes))
    largest = max(sizes)
    many = f"{request.count}x" if request.count > 1 else ""
    say = f"Say which, as in {many}{request.word}:{largest}GB."
    most = _max_per_host(sizes[largest])
    if request.count > most == 1:
        say = f"Say which, and name one of them, as in {request.word}:{largest}GB."
    elif request.count > most:
        hosts = _format_hosts(request, sizes[largest])
        say = f"Name one host and how many of them, as in {hosts} ({largest} GB)."
    return BadInputError(
        f"machine {request.name!r}: {request.word} is sold with {either}{where}. {say}"
    )


# Largest allowed ratio of a chip's memory in the catalog to the size in its product name.
_NOMINAL = 1.07


def _find_board(request: _MachineName) -> Accelerator | None:
    """Return the variant on boards that a chip's plain name stands for: H100 SXM for "h100".

    Returns None if the chip is not sold on boards. Raises BadInputError if the user must choose one
    of the memory sizes of the boards.
    """
    chips = {_slug(known): one for known, one in ACCELERATORS.items()}
    form = re.compile(rf"{re.escape(request.word)}-sxm\d?")
    plain = next((one for known, one in chips.items() if form.fullmatch(known)), None)
    if plain is not None and request.memory is None:
        return plain
    boards = {_memory_in_name(one): one for known, one in chips.items()
              if (found := form.match(known)) and "-w" not in known[found.end():]}  # fmt: skip
    if request.memory is not None and int(request.memory) in boards:
        return boards[int(request.memory)]
    if not boards:
        return None
    raise _memory_error(request, boards, " on boards")


def _has_memory(chip: Accelerator, gb: int) -> bool:
    """Return whether users may write `gb` as the size of a chip's memory in GB.

    They may write its actual size, or the size in its product name and up to 7 % more.
    """
    size = _memory_in_name(chip)
    return gb == chip.memory_bytes // _GIB or size <= gb <= _NOMINAL * size


def _memory_in_name(chip: Accelerator) -> int:
    """Return the memory size in a chip's name in GB, else its actual size in GiB."""
    match = _SIZED.search(_slug(chip.name))
    return int(match[1]) if match else chip.memory_bytes // _GIB


def _make_node(name: str, chip: Accelerator, count: int) -> Node:
    if count == 1:
        return Node(
            name=name, accelerator=chip.name, devices=1, host_link=chip.host_link,
            source=f"one accelerator of its kind: {chip.source}",
        )  # fmt: skip
    joined = chip.device_link is not None and not _is_card(chip)
    topology: Topology = "none"
    if joined:
        topology = "mesh" if chip.architecture.startswith("cdna") else "switch"
    links = chip.device_link if joined else None
    if links is not None and chip.architecture in _ONE_LINK_EACH:
        links = Bundle(link=links.link, count=min(links.count, count - 1))
    if links is not None and chip.architecture == "volta":
        # Without a switch: up to four have two links per pair (4x-v100); eight form a cube (DGX-1).
        topology = "mesh" if count <= _QUAD else "cube-mesh"
        links = Bundle(link=links.link, count=min(links.count, 2 * (count - 1)))
    how = "with all of their links to each other" if joined else "each in its slot, without bridges"
    return Node(
        name=name, accelerator=chip.name, devices=count, topology=topology,
        device_link=links, host_link=chip.host_link,
        source=f"{count} accelerators of one kind in a host, {how}: {chip.source}",
    )  # fmt: skip


# One link to each other device (AMD Instinct MI300X and MI350 series platform datasheets).
_ONE_LINK_EACH: tuple[Architecture, ...] = ("cdna3", "cdna4")
_QUAD = 4
# Parts of names of accelerators that are sold on boards, with links to the others.
_BOARD_NAMES = ("SXM", "H200", "H20", "H800", "B200", "B300", "GB200", "GB300", "GH200", "MI")


def _is_card(chip: Accelerator) -> bool:
    """Return whether the chip is a PCIe card, which needs a bridge for direct links."""
    return "NVL" in chip.name or not any(word in chip.name for word in _BOARD_NAMES)


def _list_similar(wanted: str, chips: Sequence[str]) -> list[str]:
    """Return suggestions for an unknown name: machines with similar accelerators, or accelerators.

    A name is similar to an accelerator's if one of the two ends with the other ("NVIDIA GeForce RTX
    4090" and "4090"). If no machine matches, return the accelerators whose names contain the word
    ("3060").
    """
    found = re.fullmatch(r"(?:(\d+)-?[x×*]-?)?(.+)", wanted, re.DOTALL)
    if found is None:
        return []
    count, chip = found.groups()
    word = _alphanumeric(chip)
    if len(word) < 2:
        return []
    ends = [
        one
        for one in chips
        if _alphanumeric(one).endswith(word) or word.endswith(_alphanumeric(one))
    ]
    if count is None and len(ends) == 1:
        return [repr(ends[0])]
    nodes = [
        f"{node.name!r} ({node.devices} × {node.accelerator})"
        for node in NODES.values()
        if word in _alphanumeric(node.accelerator or "") and count in (None, str(node.devices))
    ]
    named = [one for one in chips if word in _alphanumeric(one)]
    return (nodes or [repr(chip if count is None else f"{count}x{chip}") for chip in named])[:4]
