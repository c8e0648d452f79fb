"""Screenshot of a page by an installed browser."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from outpace.records.errors import BadInputError

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
    "microsoft-edge",
)  # fmt: skip
_WIDTH_PX = 1200
# Maximum height of a screenshot in Chromium.
_HIGHEST_PX = 16_384
_PATIENCE_S = 120
# Limit in the page's virtual time, which skips ahead when the page is idle.
_DRAWING_MS = 20_000


def find_browser(asked: str | None) -> str:
    """Return the path of the browser that the user `asked` for; None means any known one.

    Raises BadInputError if there is none.
    """
    for name in (asked,) if asked is not None else BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    if asked is not None:
        raise BadInputError(
            f"--browser {asked}: there is no such program. Give the path of Chromium or Chrome, or "
            "leave the option out."
        )
    raise BadInputError(
        f"--format png needs Chromium or Chrome, but none is on PATH ({', '.join(BROWSERS)}). "
        "Install one (Debian: chromium), name it with --browser, or use --format html, which "
        "any browser shows and prints."
    )


def picture(html: str, browser: str, root: bool) -> bytes:
    """Return a PNG of a whole page.

    Set `root` if this process runs as root: Chromium's sandbox does not work there and is disabled.
    Raises BadInputError if the browser fails, or if the page is too long for one picture.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "page.html"
        page.write_text(html, encoding="utf-8")
        words = [
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={_DRAWING_MS}",
            *(["--no-sandbox"] if root else []),
        ]  # fmt: skip
        height = _height_px(
            _run_browser([*words, f"--window-size={_WIDTH_PX},900", "--dump-dom"], page)
        )
        out = folder / "page.png"
        _run_browser([*words, f"--window-size={_WIDTH_PX},{height}", f"--screenshot={out}"], page)
        if not out.is_file():
            raise BadInputError(
                f"{browser} produced no picture. Use --format html, and print that."
            )
        return out.read_bytes()


def _run_browser(words: list[str], page: Path) -> str:
    try:
        done = subprocess.run(
            [*words, page.as_uri()], capture_output=True, text=True, timeout=_PATIENCE_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInputError(f"{words[0]} could not draw the page: {error}") from None
    if done.returncode:
        error_line = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise BadInputError(f"{words[0]} failed with exit code {done.returncode}: {error_line}")
    return done.stdout


def _height_px(document: str) -> int:
    """Return the page's height in px, which its script writes into the document after drawing.

    Raises BadInputError if there is no height yet, or if it is too large for one picture.
    """
    found = re.search(r'<html[^>]* data-height="(\d+)"', document)
    if found is None:
        raise BadInputError(
            f"the browser did not finish drawing within {_DRAWING_MS // 1000} s. Use --format html."
        )
    if int(found[1]) > _HIGHEST_PX:
        raise BadInputError(
            f"the page is {int(found[1]):,} px high, but a picture can have at most "
            f"{_HIGHEST_PX:,}. Report on fewer things at once, or use --format html and print "
            "it."
        )
    return int(found[1])
