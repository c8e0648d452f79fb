"""The doctor: checks of an inventory, with findings sorted by cost.

A check is a pure function that yields its findings, or raises `UnknownFactError` if it lacks a
fact.
"""

from collections.abc import Callable, Iterable

from outpace.probing.doctor.common import UnknownFactError
from outpace.probing.doctor.gpus import GPU_CHECKS
from outpace.probing.doctor.host import HOST_CHECKS
from outpace.probing.doctor.network import NETWORK_CHECKS
from outpace.records.finding import Examination, Finding, cost_order
from outpace.records.inventory import Inventory

Check = Callable[[Inventory], Iterable[Finding]]
CHECKS: dict[str, Check] = {**NETWORK_CHECKS, **GPU_CHECKS, **HOST_CHECKS}


def examine(inventory: Inventory) -> Examination:
    """Run every check on an inventory, and sort the findings by cost, highest first."""
    findings: list[Finding] = []
    checked: list[str] = []
    not_checked: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings.extend(check(inventory))
        except UnknownFactError as why:
            not_checked[name] = str(why)
        else:
            checked.append(name)
    return Examination(
        findings=tuple(sorted(findings, key=cost_order)),
        checked=tuple(checked),
        not_checked=not_checked,
    )
