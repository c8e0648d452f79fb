"""The picture of a report that README.md shows: a real run, drawn by headless Chromium.

    python benchmarks/report_picture.py [--run DIR]     # without DIR, trains for some minutes

This writes docs/images/report.png: the top of the page as it opens on a desktop. The run's speed is
that of the current machine; the picture shows what a report looks like and claims nothing.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from outpace.reporting.render.screenshot import find_browser

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "report.png"
MOST_BYTES = 300_000
WIDTH, HEIGHT = 1100, 1000  # px


def outpace(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "outpace", *words], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="directory of a finished run (default: train one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or f"{folder}/first"
        if not args.run:
            outpace("train", "--nproc=2", "--steps=150", "--eval-every=25", f"--out={run}")
        page = Path(folder) / "report.html"
        outpace("report", run, f"--out={page}")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=find_browser(None), args=["--no-sandbox"]
            )
            tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            tab.goto(page.as_uri())
            tab.wait_for_selector(".plotly svg.main-svg")
            tab.wait_for_timeout(1000)  # the curves are drawn after what is in view
            PICTURE.parent.mkdir(exist_ok=True)
            tab.screenshot(path=PICTURE)
            browser.close()
    size = PICTURE.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{PICTURE} has {size:,} bytes; at most {MOST_BYTES:,} are allowed")
    print(f"{PICTURE}: {size:,} bytes")


if __name__ == "__main__":
    main()
