"""Pages in a real browser: everything is drawn, nothing is fetched, nothing that was named runs."""

import json
import shutil

import pytest

from outpace.cli.main import main
from outpace.records.comparison import Comparison
from outpace.records.estimate import Plans
from outpace.records.machine import Machine
from outpace.records.topology import Endpoint, Topology
from outpace.records.tuning import Tuning
from outpace.records.utilisation import HostLoad, Load, series
from outpace.reporting.data.run_folder import read_run
from outpace.reporting.documents.certificate import certificate_document
from outpace.reporting.documents.comparison import comparison_document
from outpace.reporting.documents.plan import plan_document
from outpace.reporting.documents.probe import probe_document
from outpace.reporting.documents.run import run_document
from outpace.reporting.documents.tuning import tuning_document
from outpace.reporting.page import page
from outpace.reporting.render.document import DataTable, Document, DocumentSection
from outpace.reporting.render.screenshot import BROWSERS
from outpace.reporting.sections.environment import topology
from outpace.reporting.sections.utilisation import utilisation

CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="NO CHROMIUM ON PATH: the browser tests of reports are SKIPPED (Debian: chromium)",
)
KINDS = ("run", "pipeline", "comparison", "plans", "probe", "tuning")
PATIENCE_MS = 180_000  # on a busy machine a browser takes more than Playwright's half minute
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
EVIL = '"><img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'


# Of the others what is drawn is alike; all of them with scripts/test --all.
EACH = [pytest.param(name, marks=() if name == "run" else pytest.mark.slow) for name in KINDS]


def links(machine):
    """A drawing of two devices that are joined."""
    ends = tuple(Endpoint(name=f"GPU{n}", kind="gpu") for n in range(2))
    joined = Topology(devices=ends, links=(("X", "NV4"), ("NV4", "X")), source="a test")
    return topology(machine.model_copy(update={"topology": joined}))


def many():
    """Forty cores, and a table of as many rows."""
    loads = [Load(duration_s=1.0, host=HostLoad(cores=(n / 20,) * 40)) for n in range(20)]
    busy = series(loads, started="2026-11-22T00:00:00+00:00", period_s=1.0, sampler_cpu_s=0.1)
    table = DataTable("a long table", ("a",), tuple((f"row {n}",) for n in range(40)))
    return DocumentSection("Many", (*utilisation([busy]), table))


@pytest.fixture(scope="module")
def pages(run, pipeline_run, comparison, plans, probe, tuning, evil, tmp_path_factory):
    """A file for each kind of report."""
    machine = Machine.load(probe)
    documents = {
        "run": run_document(read_run(run), machine),
        "pipeline": run_document(read_run(pipeline_run), machine),
        "comparison": comparison_document(
            Comparison.load(comparison / "comparison.json"), comparison, machine
        ),
        "plans": plan_document(Plans.load(plans)),
        "probe": probe_document(machine, machine.probed),
        "tuning": tuning_document(Tuning.load(tuning), tuning.parent),
        "evil": comparison_document(Comparison.load(evil), comparison),
    }
    documents["links"] = Document("run", "links", ("eight",), (), (links(machine), many()))
    folder = tmp_path_factory.mktemp("pages")
    for name, document in documents.items():
        (folder / f"{name}.html").write_text(page([document]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        yield running
        running.close()


class Tab:
    """A page that was opened and drawn, with all it asked for and complained about."""

    def __init__(self, context, path):
        self.said, self.asked = [], []
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def run(self, script, *arguments):
        return self.page.evaluate(script, *arguments)


@pytest.fixture(scope="module")
def open_page(browser, pages):
    """Pages that are wide and light, each opened once, for tests that change nothing of them."""
    contexts, tabs = [], {}

    def tab(name):
        if name not in tabs:
            contexts.append(browser.new_context(viewport=WIDE, color_scheme="light", offline=True))
            tabs[name] = Tab(contexts[-1], pages / f"{name}.html")
        return tabs[name]

    yield tab
    for context in contexts:
        context.close()


@pytest.fixture
def blank(browser):
    """A page that is wide and light, and not opened yet."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", offline=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


@pytest.fixture
def opened(browser, pages):
    contexts = []

    def tab(name, viewport=WIDE, scheme="light", **more):
        asked = {"viewport": viewport, "color_scheme": scheme, "offline": True, **more}
        contexts.append(browser.new_context(**asked))
        return Tab(contexts[-1], pages / f"{name}.html")

    yield tab
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("scheme", "viewport"), [("light", WIDE), ("dark", PHONE)], ids=["light-wide", "dark-phone"]
)
@pytest.mark.parametrize("name", EACH)
def test_all_is_drawn_without_a_word_or_a_request(opened, open_page, name, scheme, viewport):
    tab = open_page(name) if viewport is WIDE else opened(name, viewport, scheme)
    assert tab.said == []
    assert [url.partition(":")[0] for url in tab.asked if not url.startswith("data:")] == ["file"]
    drawn = tab.run("""() => [...document.querySelectorAll(".plot")].map((plot) => ({
        marks: plot.querySelectorAll(".plot path, .trace path, image, .points path").length,
        wide: plot.querySelector(".main-svg").getBoundingClientRect().width,
        room: plot.getBoundingClientRect().width,
        scrolls: plot.querySelectorAll(".legend .scrollbar:not([width='0'])").length,
        covered: [...plot.querySelectorAll(".legend .bg")].some((legend) => {
            const [one, bar] = [legend, plot.querySelector(".modebar")].map(
                (part) => part.getBoundingClientRect());
            return bar.bottom > one.top + 1 && bar.top < one.bottom && bar.left < one.right;
        }),
    }))""")
    assert len(drawn) == int(tab.run("document.documentElement.dataset.drawn")) >= 3
    assert all(one["marks"] > 0 and 200 < one["wide"] <= one["room"] + 1 for one in drawn), drawn
    assert not any(one["scrolls"] for one in drawn), "a legend has no room"
    assert not any(one["covered"] for one in drawn), "the toolbar covers a legend"
    wide = tab.run("document.documentElement.scrollWidth")
    assert wide <= viewport["width"], f"{wide} px in {viewport['width']}: scrolls sideways"


@pytest.mark.slow
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_margins_settle_whatever_the_values(opened, viewport):
    """Plotly gives up, and says so, where room for labels changes which labels there are."""
    tab = opened("run", viewport)
    tab.run("""async () => {
        let state = 1;
        const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
        for (const place of document.querySelectorAll(".plot")) {
            const values = place.data.some((one) => one.orientation === "h") ? "x" : "y";
            for (let round = 0; round < 40; round += 1) {
                const size = 10 ** (8 * random() - 4);
                const scaled = (one) => (typeof one === "number" ? one * size * random() : one);
                const data = place.data.map((one) => (
                    { ...one, [values]: Array.from(one[values] ?? [], scaled) }));
                const layout = structuredClone(place.layout);
                await Plotly.newPlot(place, data, layout, { responsive: true });
            }
        }
    }""")
    assert tab.said == []


def test_what_is_in_view_is_drawn_first(blank, pages):
    """A reader who goes on to the last figure sees that before what was passed over."""
    blank.add_init_script("""
        const drawn = () => [...document.querySelectorAll(".plot")].map(
            (plot) => plot.querySelector(".main-svg") !== null);
        new MutationObserver(() => {
            if (window.atSeen === undefined && document.documentElement.dataset.seen === "") {
                window.atSeen = drawn();
                const last = [...document.querySelectorAll(".plot")].at(-1);
                last.scrollIntoView({ behavior: "instant" });
            }
            if (window.atLast === undefined && window.atSeen && drawn().at(-1)) {
                window.atLast = drawn();
            }
        }).observe(document, { attributes: true, childList: true, subtree: true });
    """)
    blank.goto((pages / "run.html").as_uri())
    blank.wait_for_selector("html[data-drawn]", state="attached")
    seen, last = blank.evaluate("[window.atSeen, window.atLast]")
    assert seen[0] and not seen[-1], seen
    assert last[-1] and not all(last), last


def test_a_page_that_is_printed_at_once_has_all_its_figures(blank, pages):
    blank.add_init_script("""addEventListener("DOMContentLoaded", () => {
        dispatchEvent(new Event("beforeprint"));
        window.drawn = [...document.querySelectorAll(".plot")].map(
            (plot) => plot.querySelectorAll(".plot-container").length);
    })""")
    blank.goto((pages / "run.html").as_uri())
    blank.wait_for_selector("html[data-drawn]", state="attached")
    assert set(blank.evaluate("window.drawn")) == {1}


@pytest.mark.parametrize("name", EACH)
def test_every_figure_has_words_and_a_table(open_page, name):
    tab = open_page(name)
    counts = tab.run("""() => ["figure > .plot", "figure > .plot[role=img][aria-label]",
        "figure > details tbody tr:first-child"].map((q) => document.querySelectorAll(q).length)""")
    assert counts[0] == counts[1] == counts[2] > 0


def colour_of(tab, query):
    """(r, g, b) of what fills the first one."""
    text = tab.run("(q) => getComputedStyle(document.querySelector(q)).fill", query)
    return [float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def test_words_in_figures_can_be_read_in_light_and_dark(opened, open_page):
    light, dark = open_page("comparison"), opened("comparison", scheme="dark")
    for query in (".xtick text", ".ytick text", ".xtitle", ".legendtext"):
        assert max(colour_of(light, query)) < 100, query
        assert min(colour_of(dark, query)) > 180, query


def test_a_reader_who_turns_dark_on_needs_no_new_page(opened):
    tab = opened("run")
    tab.page.emulate_media(color_scheme="dark")
    assert min(colour_of(tab, ".xtick text")) > 180


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_print_is_dark_on_light_and_fits_the_paper(opened, scheme):
    tab = opened("pipeline", scheme=scheme)
    tab.page.emulate_media(media="print", color_scheme=scheme)
    tab.page.set_viewport_size({"width": 700, "height": 1000})
    assert max(colour_of(tab, ".xtick text")) < 100
    widths = tab.run("""() => [...document.querySelectorAll(".main-svg")].map(
        (svg) => svg.getBoundingClientRect().right)""")
    assert widths and max(widths) <= 700
    assert tab.run("document.documentElement.scrollWidth") <= 700
    assert tab.page.pdf(format="A4").startswith(b"%PDF")
    assert tab.said == []


def test_names_are_shown_and_never_run(opened, evil):
    tab = opened("evil")
    name = Comparison.load(evil).arms[0].arm
    assert tab.run("window.hacked") is None and tab.said == []
    assert tab.run("document.querySelectorAll('img, main script').length") == 0
    assert tab.run("(name) => document.querySelector('h1').textContent.includes(name)", name)
    ticks = tab.run("[...document.querySelectorAll('.ytick text')].map((one) => one.textContent)")
    assert any("<script>" in tick for tick in ticks)
    legends = tab.run(
        "[...document.querySelectorAll('.legendtext')].map((one) => one.dataset.unformatted)"
    )
    assert any("&lt;script&gt;" in legend for legend in legends)


def test_a_run_of_an_evil_name_is_shown_by_the_command_and_runs_nothing(run, browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=window.hacked=1><script>window.hacked=1;"
    shutil.copytree(run, folder)
    changed = {"command": [EVIL], "commit": EVIL, "environment": {EVIL: EVIL}, "tokenizer": EVIL}
    record = json.loads((folder / "run.json").read_text()) | changed
    record["settings"] |= {"model": EVIL, "data": [EVIL]}
    record["versions"][EVIL] = EVIL
    (folder / "run.json").write_text(json.dumps(record))
    result = json.loads((folder / "result.json").read_text()) | {"sample": EVIL, "run": EVIL}
    (folder / "result.json").write_text(json.dumps(result))
    assert main(["report", str(folder), "--json"]) == 0
    context = browser.new_context(viewport=WIDE, offline=True)
    tab = Tab(context, folder / "report.html")
    assert tab.run("window.hacked") is None and tab.said == []
    assert tab.run("document.querySelectorAll('img, main script').length") == 0
    assert tab.run("(name) => document.body.textContent.includes(name)", EVIL)
    assert tab.run("(name) => document.body.textContent.includes(name)", folder.name)
    context.close()


def test_tables_sort_by_value_and_back(opened):
    tab = opened("plans")
    heads = tab.run("""() => [...document.querySelectorAll("table")].map((table) =>
        [...table.tHead.rows[0].cells].map((cell) => cell.textContent))""")
    table, place = next((n, h.index("memory")) for n, h in enumerate(heads) if "memory" in h)
    click = """([table, place]) => document.querySelectorAll("table")[table].tHead.rows[0]
        .cells[place].querySelector("button").click()"""

    def values():
        return tab.run("""([table, place]) => [...document.querySelectorAll("table")[table]
            .tBodies[0].rows].map((row) => Number(row.cells[place].dataset.value))""",
            [table, place])  # fmt: skip

    before = values()
    assert len(set(before)) > 1
    tab.run(click, [table, place])
    assert values() == sorted(before)
    tab.run(click, [table, place])
    assert values() == sorted(before, reverse=True)
    state = tab.run("([t, p]) => document.querySelectorAll('table')[t].tHead.rows[0].cells[p]"
                    ".getAttribute('aria-sort')", [table, place])  # fmt: skip
    assert state == "descending"
    tab.run(click, [table, 0])  # by number, as they came
    assert heads[table][0] == "plan" and values() == before


def test_losses_can_be_put_over_tokens_and_zoomed(opened):
    tab = opened("run")
    reach = "() => document.querySelector('.choices').nextElementSibling._fullLayout.xaxis.range[1]"
    steps = tab.run(reach)
    tab.page.click("text=by tokens")
    tab.page.wait_for_function("(n) => document.querySelector('.choices').nextElementSibling"
                               "._fullLayout.xaxis.range[1] > 2 * n", arg=steps)  # fmt: skip
    tokens = tab.run(reach)
    assert tokens > 1000 > steps
    assert tab.run("document.querySelector('.xtitle').textContent") == "tokens (tokens)"
    area = tab.page.query_selector(".choices + .plot .nsewdrag")
    area.scroll_into_view_if_needed()  # findings above it may leave half of it below the window
    box = area.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + 50, y)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 200, y, steps=4)
    tab.page.mouse.up()
    tab.page.wait_for_function("(n) => document.querySelector('.choices').nextElementSibling"
                               "._fullLayout.xaxis.range[1] < n / 2", arg=tokens)  # fmt: skip
    assert tab.said == []


def test_a_finger_scrolls_past_figures_and_a_drawing_scrolls_in_its_box(opened, open_page):
    drag = "document.querySelector('.plot')._fullLayout.dragmode"
    assert open_page("links").run(drag) == "zoom"
    tab = opened("links", PHONE, "dark", has_touch=True, is_mobile=True)
    assert tab.run(drag) is False
    assert tab.run("document.documentElement.scrollWidth") <= PHONE["width"]
    box = tab.run("""() => { const box = document.querySelector(".picture .scroll");
        return [box.clientWidth, box.scrollWidth] }""")
    assert box[0] <= PHONE["width"] and box[1] >= 900  # and its words can be read


def test_a_drawing_is_on_the_pages_own_ground(opened, open_page):
    for tab, light in ((open_page("links"), False), (opened("links", scheme="dark"), True)):
        assert tab.run("getComputedStyle(document.querySelector('.paper')).fill") == "none"
        beside, inside = ".picture text[font-size='17']", ".picture text[font-size='14']"
        assert (min(colour_of(tab, beside)) > 180) == light
        assert max(colour_of(tab, inside)) < 60  # in a box, which is always light


def test_a_heat_map_labels_some_rows_and_names_all(open_page):
    tab = open_page("links")
    ticks = tab.run("[...document.querySelectorAll('.ytick text')].map((one) => one.textContent)")
    assert ticks[:2] == ["core 0", "core 1"] and len(ticks) == 40
    names = tab.run("document.querySelector('.plot').data[0].y")
    assert names == [f"core {core}" for core in range(40)]


def test_long_tables_are_closed_on_a_screen_and_open_on_paper(opened):
    tab = opened("links")
    row = "document.querySelector('.long td').checkVisibility()"
    assert tab.run(row) is False
    tab.page.emulate_media(media="print")
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(row) is True
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert tab.run(row) is False


def test_a_certificate_needs_no_figures(certificate, browser, tmp_path):
    (tmp_path / "c.html").write_text(page([certificate_document(certificate)]), encoding="utf-8")
    context = browser.new_context(viewport=PHONE, offline=True)
    tab = Tab(context, tmp_path / "c.html")
    assert tab.said == [] and tab.run("document.documentElement.dataset.drawn") == "0"
    assert tab.run("document.documentElement.scrollWidth") <= PHONE["width"]
    context.close()
