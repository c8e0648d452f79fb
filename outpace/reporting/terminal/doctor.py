"""The doctor's findings in a terminal: most costly first, each with its remedy."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from outpace.records.finding import Examination, Finding, Severity

_STYLES: dict[Severity, str] = {
    "severe": "bold red",
    "high": "red",
    "moderate": "yellow",
    "low": "cyan",
}


def examination_text(examination: Examination) -> Group:
    """Format the findings, the checks that were made, and why others were not."""
    lines: list[RenderableType] = []
    for number, finding in enumerate(examination.findings, 1):
        lines += _finding_lines(number, finding)
    count = len(examination.findings)
    count_words = f"{count} finding{'s' if count != 1 else ''}" if count else "No problems found"
    looked = f"{count_words}. Checked: {', '.join(examination.checked) or 'nothing'}."
    lines.append(Text(looked, style="" if count else "green"))
    reasons: dict[str, list[str]] = {}
    for name, why in examination.not_checked.items():
        reasons.setdefault(why, []).append(name)
    if reasons:
        lines.append(Text("Not checked:"))
    for why, names in reasons.items():
        lines.append(_indent(f"{', '.join(names)}: {why}", 2, "dim"))
    return Group(*lines)


def _finding_lines(number: int, finding: Finding) -> list[RenderableType]:
    head = Text(f"{number}. ")
    head.append(finding.severity, style=_STYLES[finding.severity])
    head.append(f" · {finding.check}: {finding.what}", style="bold")
    cost = "cost: not known"
    if finding.costs is not None:
        cost = f"cost: {finding.costs} ({finding.costs.source})"
    body = [f"seen: {finding.seen}", f"fix: {finding.remedy}", cost]
    return [head, *(_indent(line, 3) for line in body), Text("")]


def _indent(words: str, by: int, style: str = "") -> Padding:
    return Padding(Text(words, style=style), (0, 0, 0, by))
