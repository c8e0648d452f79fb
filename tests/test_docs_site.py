"""The site that is built of docs/: every link leads somewhere, and every page fits its window."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from outpace.reporting.render.screenshot import BROWSERS

ROOT = Path(__file__).parents[1]
CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)
SOURCES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in SOURCES]
# One of each kind: tables, long tables, figures, code, generated. The others are slow.
LOOKED_AT = {"index.html", "guides/plan.html", "results/accuracy.html", "reference/python.html"}
WIDTHS = {"desktop": (1280, 900), "phone": (360, 740)}
PATH_IN_TEXT = re.compile(
    r"(?<![\w./-])(?:docs/[\w/-]+\.(?:md|svg|png)|(?:tests|benchmarks)/[\w/-]+\.py)\b"
)


def build(folder, *plant):
    """Copy the docs into the folder, add each planted text to the first page, and build them."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    with (folder / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.writelines(f"\n{text}\n" for text in plant)
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs-site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


class _Anchors(HTMLParser):
    """Names that a page can be entered by, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.names, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


@functools.cache
def anchors(path):
    return _Anchors(path.read_text(encoding="utf-8"))


def test_reference_pages_say_what_the_code_declares():
    done = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    missing = [str(path.relative_to(ROOT / "docs")) for path in SOURCES
               if f'"{path.relative_to(ROOT / "docs")}"' not in listed]  # fmt: skip
    assert missing == []


def test_no_link_of_the_site_is_broken(site):
    broken = []
    for page in PAGES:
        for link in anchors(site / page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (site / page).parent / unquote(parts.path) if parts.path else site / page
            target = target / "index.html" if target.is_dir() else target
            known = target.is_file() and (
                not parts.fragment or unquote(parts.fragment) in anchors(target).names
            )
            broken += [] if known else [f"{page}: {link}"]
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[x](guides/none.md)", "[x](guides/plan.md#none)"])
def test_a_broken_link_fails_the_build(link, tmp_path):
    done = build(tmp_path, link)
    assert done.returncode != 0 and "does not exist" in done.stdout + done.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_no_link_of_a_page_outside_docs_is_broken(page):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    own = [link for link in links if not urlsplit(link).scheme]
    assert own and [link for link in own if not (ROOT / link.partition("#")[0]).exists()] == []


def test_files_that_code_and_docs_name_exist():
    files = [
        path
        for folder in ("outpace", "benchmarks", "tests", "scripts", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", "") and path.is_file()
        # Files of other projects, and of past days.
        and not path.name.startswith("published") and path.name != "log.md"
    ]  # fmt: skip
    named = {(name, str(path.relative_to(ROOT))) for path in files
             for name in PATH_IN_TEXT.findall(path.read_text(encoding="utf-8"))}  # fmt: skip
    assert len(named) > 20
    assert sorted(pair for pair in named if not (ROOT / pair[0]).exists()) == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab(address):
    """A tab, with everything its pages complained about or failed to fetch, by page."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("requestfailed", lambda request: faults.append(f"failed: {request.url}"))
        page.on("request", lambda request: request.url.startswith((address, "data:", "blob:"))
                or faults.append(f"from elsewhere: {request.url}"))  # fmt: skip
        page.on("response", lambda answer: answer.status < 400
                or faults.append(f"{answer.status}: {answer.url}"))  # fmt: skip
        page.on("console", lambda said: said.type != "error" or faults.append(said.text))
        yield page, faults
        browser.close()


@pytest.mark.skipif(
    CHROMIUM is None,
    reason="NO CHROMIUM ON PATH: the browser tests of the site are SKIPPED (Debian: chromium)",
)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in LOOKED_AT else pytest.mark.slow) for page in PAGES],
)
def test_a_page_fits_its_window_and_complains_of_nothing(page, tab, address):
    shown, faults = tab
    faults.clear()
    shown.goto(f"{address}/{page}")
    shown.wait_for_load_state("networkidle")
    for name, (width, height) in WIDTHS.items():
        shown.set_viewport_size({"width": width, "height": height})
        wide = shown.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{page} is {wide} px wide on a {name} of {width} px"
    assert faults == []
