"""Page: one file without a link, with every name escaped; in a browser, every panel has its data.

The tests in a browser need Chromium, its driver and the package selenium.
"""

from __future__ import annotations

import builtins
import json
import re
import shutil
import time
from html.parser import HTMLParser

import pytest

from osdp_compile.reports.page.collect import Sources, collect
from osdp_compile.reports.page.page import page_of, save_page
from passes.simulate.chrome_trace import StepTimeline
from passes.simulate.timeline import COMPUTE, Buffer, Event, LeftOut, Lived, Timeline
from passes.types.decision import Decision
from passes.types.decode import encoded
from passes.types.plan import Plan
from passes.types.units import format_bytes
from tests.osdp_compile.reports.page.sources import EVIL, sources

pytest.importorskip("bokeh", reason="pages are drawn with Bokeh")

#: Of a folded plan. The library takes 1.3 MB.
MOST_BYTES = 5_000_000


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    save_page(sources(), path, "a test")
    return path


class Tags(HTMLParser):
    """The elements of a page, the addresses in them, and the texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)


def test_the_page_has_no_link_and_no_name_of_the_model_is_an_element(page):
    text = page.read_text()
    found = Tags()
    found.feed(text)
    assert found.links == [] and found.handlers == [] and "img" not in found.tags
    assert found.tags.count("script") == 3
    assert EVIL not in text and EVIL.replace("'", "&#39;") not in text
    assert "&lt;/script&gt;&lt;script&gt;evil = 1" in text
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text).group(1)
    assert "default-src 'none'" in policy and "http" not in policy and "*" not in policy


def test_the_page_has_its_contents_as_json(page):
    text = page.read_text()
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1)
    )
    contents = encoded(collect(sources()))
    assert {name: data[name] for name in contents} == json.loads(json.dumps(contents))
    assert set(data["figures"]) == {"step", "frontier"}


def large_step() -> Sources:
    """126 alike layers of nine parameters; 20,000 kernels and buffers, after a gap."""
    count, each = 20_000, 1e-3
    row = sources().plan["layers.0.weight"]
    named = [
        (f"model.layers.{n}.mlp.projection_{m}.weight", row)
        for n in range(126)
        for m in "abcdefghi"
    ]
    label = "mm in model.layers.{}.mlp.projection".format
    phase = Timeline(
        phase="forward",
        step_seconds=count * each,
        events=tuple(
            Event(f"mm_{n}", label(n % 126), COMPUTE, n * each, (n + 1) * each)
            for n in range(count)
        ),
        stalls=(),
        memory=((0.0, 1000),),
        base={"parameters": 1000},
        peak_bytes=1000,
        peak_seconds=0.0,
        peak_at="mm_0",
        peak_buffers=(),
        places_seconds=tuple(n * each for n in range(count)),
        lives=tuple(
            Lived(Buffer(f"mm_{n}", label(n % 126), "activations", n + 1), n, min(n + 9, count - 1))
            for n in range(count)
        ),
        left_out=LeftOut("left_out", "layers 3 to 122, 120 alike", "", 120, 4, 5, 0.005, 0.006),
    )
    plan = Plan.uniform(named, Decision.SHARD_REGATHER, world_size=1024)
    return Sources("Large", "h100-sxm", plan, StepTimeline((phase,), 1024), None)


def test_a_page_of_a_large_step_is_small_and_says_what_it_merges():
    contents = collect(large_step())
    assert len(page_of(contents)) < MOST_BYTES
    assert [(row.name, row.parameters) for row in contents.rows] == [
        (f"model.layers.{{0..125}}.mlp.projection_{m}.weight", 126) for m in "abcdefghi"
    ]
    assert contents.memory.peak_bytes == 1000 + sum(range(19_991, 20_001))
    notes = " ".join(contents.notes)
    for words in (
        "120 layers between them are alike: one bar stands for all",
        "bars for 20,001 events: short neighbours of one kind are merged",
        "the highest and the last value of each 34 moments",
        "18,500 buffers smaller than",
    ):
        assert words in notes


def test_without_bokeh_the_extra_is_named(monkeypatch, tmp_path):
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("bokeh"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"--html needs Bokeh: pip install 'osdp-compile\[html\]"):
        save_page(sources(), tmp_path / "report.html", "--html")
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for one in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1500,2400"):
        options.add_argument(f"--{one}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)
    yield found
    found.quit()


@pytest.fixture
def opened(browser, page):
    browser.get(page.as_uri())
    until = time.monotonic() + 60
    while not browser.execute_script("return document.body.dataset.drawn"):
        assert time.monotonic() < until, browser.get_log("browser")
        time.sleep(0.05)
    return browser


def element(browser, selector):
    return browser.find_element("css selector", selector)


def test_it_opens_without_an_error_and_without_the_network(opened, page):
    errors = [one for one in opened.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]
    assert errors == []
    sent = [json.loads(one["message"])["message"] for one in opened.get_log("performance")]
    urls = {
        one["params"]["request"]["url"]
        for one in sent
        if one["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in urls if not url.startswith("data:")} <= {page.as_uri()}
    assert opened.execute_script("return typeof evil") == "undefined"


def test_every_panel_has_its_data(opened):
    given, contents = sources(), collect(sources())
    for panel in ("step", "alternatives", "measured", "frontier", "modules", "plan"):
        assert element(opened, f"#panel-{panel}").is_displayed()
    rows = opened.find_elements("css selector", "#plan tbody tr")
    assert [row.find_element("css selector", "td").text for row in rows] == [
        row.name for row in contents.rows
    ]
    assert "\N{MULTIPLICATION SIGN}3" in element(opened, "#panel-modules").text
    others = element(opened, "#panel-alternatives").text
    assert all(name in others for name in given.others)
    assert "1 ms" in element(opened, "#panel-measured").text
    drawn = opened.execute_script(
        "const of = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find((m) => m);"
        "return [of('spans').data.label.length, of('memory by kind').data.x.length,"
        " of('frontier points').data.x.length, of('limit') != null, of('measured peak') != null]"
    )
    assert drawn == [len(contents.lanes.spans), len(contents.memory.seconds), 2, True, True]


#: A click in the middle of a bar: where it is on the screen.
PLACE = """
const model = Bokeh.documents.map((d) => d.get_model_by_name("spans")).find((m) => m);
const figure = Bokeh.documents.map((d) => d.get_model_by_name("timeline")).find((m) => m);
const view = Bokeh.index.find_one(figure), box = view.el.getBoundingClientRect();
const middle = (a, b) => (model.data[a][arguments[0]] + model.data[b][arguments[0]]) / 2;
return [box.left + view.frame.x_scale.compute(middle("left", "right")),
        box.top + view.frame.y_scale.compute(middle("top", "bottom"))];
"""


def test_a_click_on_a_collective_shows_its_reason(opened):
    from selenium.webdriver import ActionChains

    spans = collect(sources()).lanes.spans
    index = max(
        (i for i, one in enumerate(spans) if one.kind in ("gather", "reduce")),
        key=lambda i: spans[i].exposed_seconds,
    )
    assert spans[index].reason
    x, y = opened.execute_script(PLACE, index)
    actions = ActionChains(opened)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y)).click()
    actions.perform()
    detail = element(opened, "#detail").text
    assert spans[index].label in detail and spans[index].reason in detail
    assert "compute waits" in detail


def test_the_search_the_sort_and_the_cursor_work(opened):
    from selenium.webdriver import ActionChains

    contents = collect(sources())
    element(opened, "#search").send_keys("layers.1.weight")
    matching = [s for s in contents.lanes.spans if "layers.1.weight" in f"{s.label} {s.serves}"]
    assert element(opened, "#found").text.startswith(f"{len(matching)} bars, ")

    element(opened, "#plan th:nth-child(5)").click()
    sizes = opened.execute_script(
        "return [...document.querySelectorAll('#plan tbody td:nth-child(5)')]"
        ".map((cell) => Number(cell.dataset.value))"
    )
    assert sizes == sorted(row.size_bytes for row in contents.rows)

    at_peak = element(opened, "#alive").text
    assert at_peak.startswith(f"the peak, {format_bytes(contents.memory.peak_bytes)} at ")
    ActionChains(opened).move_to_element_with_offset(element(opened, "#step"), 200, 150).perform()
    assert element(opened, "#alive").text != at_peak
    assert "parameters" in element(opened, "#alive").text
