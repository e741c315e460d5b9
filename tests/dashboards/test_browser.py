"""The dashboard in a real browser, on a store a live collector owns: what AppTest cannot see.

Needs Chromium on the PATH; without it these tests are skipped, and in CI they fail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from collectors.server import start_process
from dashboards.launch import command
from rlinsight import store as stores
from tests.dashboards import foreign
from tests.synthetic import SECOND, Request, Run, requests

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 60_000
RUN = "live-20251130-120000-aaaa"
# What the model says, replaced by markup of the same length so that the message's own sizes stay true.
MARKUP = {b"The so, soThe": b"<img src=xyz>", b" number": b"<u></u>"}

TABLE, FIRST_ROW = ".stDataFrameGlideDataEditor", {"x": 20, "y": 50}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="chromium is not installed"),
    pytest.mark.timeout(300),
]
expect.set_options(timeout=WAIT_MS)


@dataclass
class Feed:
    """Sends a synthetic run to a collector, one step at a time."""

    url: str
    start_ns: int
    steps: int = 0
    sent: int = 0

    def advance(self, steps: int) -> None:
        """Send until ``steps`` are finished; the run stays open."""
        run = Run(RUN, "live", steps=steps, groups=4, group_size=4, total_steps=9, status=None, start_ns=self.start_ns)
        every = list(requests(run))[:-2]  # the last two say that a further step is open
        for request in every[self.sent :]:
            self._post(request)
        self.sent, self.steps = len(every), steps

    def _post(self, request: Request) -> None:
        body = request.message.SerializeToString()
        for said, markup in MARKUP.items():
            body = body.replace(said, markup)
        headers = {"content-type": "application/x-protobuf", "x-rlinsight-producer": request.producer}
        headers["x-rlinsight-seq"] = str(request.seq)
        httpx.post(f"{self.url}/v1/{request.signal}", content=body, headers=headers, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Feed]]:
    store = tmp_path_factory.mktemp("browser") / "live.duckdb"
    endpoint = start_process(store, os.getpid())
    feed = Feed(endpoint.http, time.time_ns() - 60 * SECOND)
    feed.advance(3)
    yield store, feed
    os.kill(endpoint.pid, 15)


@pytest.fixture(scope="module")
def url(live: tuple[Path, Feed]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(command(live[0], port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{base}/_stcore/health", timeout=5)
            break
        except OSError:
            assert server.poll() is None, "streamlit ended"
            assert time.monotonic() < deadline, "streamlit did not start within 60 s"
            time.sleep(0.1)
    yield base
    server.terminate()
    server.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "chromium is not installed; apt-get install chromium"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1500, "height": 1100})
    page.set_default_timeout(WAIT_MS)
    yield page
    assert page.locator('[data-testid="stException"]').count() == 0
    page.close()


def open_first_row(page: Page) -> None:
    """Click the table's first row until a rollout is open: a click on a table that is being replaced goes nowhere."""
    strip, deadline = page.locator(".rl-tokens"), time.monotonic() + WAIT_MS / 1000
    while not strip.count() and time.monotonic() < deadline:
        page.locator(TABLE).first.click(position=FIRST_ROW)
        with contextlib.suppress(PlaywrightTimeout):
            strip.wait_for(timeout=5000)
    expect(strip).to_be_visible()


def select_step_2(page: Page) -> None:
    """Click the reward curve's point of step 2 and wait until the page says so."""
    chart = page.locator(".js-plotly-plot").first
    x, y = chart.evaluate("""chart => {
        const axes = chart._fullLayout, box = chart.getBoundingClientRect();
        const reward = chart._fullData.find(trace => trace.name === "reward");
        return [box.left + axes.xaxis._offset + axes.xaxis.d2p(reward.x[1]),
                box.top + axes.yaxis._offset + axes.yaxis.d2p(reward.y[1])];
    }""")
    page.mouse.move(x, y)
    expect(chart.locator(".hoverlayer > g")).not_to_have_count(0)
    page.mouse.click(x, y)
    expect(page.get_by_text("Step 2")).to_be_visible()
    assert "step=2" in page.url


def test_overview_selects_a_step_by_click(url: str, page: Page) -> None:
    """Twelve panels are drawn; a click on a point selects its step, puts it in the URL and offers the ways onward."""
    page.goto(url)
    expect(page.locator(".js-plotly-plot .annotation-text")).to_have_count(12)
    select_step_2(page)
    page.locator('a[href*="from=2"]').click()
    expect(page.get_by_text("16 rollouts")).to_be_visible()
    assert "from=2" in page.url
    assert f"run={RUN}" in page.url


def test_timeline_draws_lanes(url: str, page: Page) -> None:
    """Lanes and bars of the chosen step are drawn, and the table names the unattributed rest."""
    page.goto(f"{url}/timeline?step=2")
    chart = page.locator(".js-plotly-plot").first
    expect(chart.locator(".ytick text").first).to_have_text("controller")
    assert chart.locator(".point").count() > 20
    expect(page.get_by_text("Where the time went: step 2")).to_be_visible()


def test_rollout_opens_down_to_its_tokens(url: str, page: Page) -> None:
    """A click on a row opens the rollout; hovering a token shows its numbers; the link reopens it."""
    page.goto(f"{url}/rollouts")
    expect(page.get_by_text("48 rollouts")).to_be_visible()
    page.get_by_label("To step").fill("1")
    page.get_by_label("To step").press("Enter")
    expect(page.get_by_text("16 rollouts")).to_be_visible()
    strip = page.locator(".rl-tokens")
    open_first_row(page)
    expect(strip).to_be_visible()
    assert "rollout=" in page.url
    token = strip.locator("span").first
    token.hover()
    tip = token.evaluate("e => getComputedStyle(e, '::after').content")
    assert "rollout" in tip
    before = token.get_attribute("style")
    page.get_by_role("radio", name="advantage").or_(page.get_by_role("button", name="advantage")).first.click()
    expect(token).not_to_have_attribute("style", before or "")
    link = page.url
    page.goto(link)
    expect(page.locator(".rl-tokens")).to_be_visible()


def test_model_text_stays_text(url: str, page: Page) -> None:
    """Markup in a response is shown as typed, in its text, its tokens and its siblings: no element is made of it."""
    page.goto(f"{url}/rollouts?q=%3Cimg")
    open_first_row(page)
    expect(page.locator(".rl-text").nth(1)).to_contain_text("<img src=xyz>")
    expect(page.locator(".rl-tokens")).to_contain_text("<u></u>")
    expect(page.locator(".rl-card").filter(has_text="<img").first).to_be_visible()
    assert page.locator(".stHtml img, .stHtml u").count() == 0


def test_sql_runs_by_keyboard(url: str, page: Page) -> None:
    """Ctrl+Enter runs the editor's text; a wrong one shows DuckDB's sentence."""
    page.goto(f"{url}/sql")
    editor = page.get_by_label("SQL", exact=True)
    editor.fill("SELECT step, reward_mean FROM train_metrics ORDER BY step")
    editor.press("Control+Enter")
    expect(page.get_by_text("2 columns")).to_be_visible()
    editor.fill("SELECT nothing FROM nowhere")
    editor.press("Control+Enter")
    expect(page.get_by_text("nowhere does not exist")).to_be_visible()


def test_live_run_moves_by_itself(live: tuple[Path, Feed], url: str, page: Page) -> None:
    """A step that ends while the page is open appears untouched, in the header and in the curves."""
    _, feed = live
    page.goto(url)
    expect(page.locator(".rl-bar")).to_contain_text(f"step {feed.steps} / 9")
    expect(page.locator(".rl-bar")).to_contain_text("live from the collector")
    feed.advance(feed.steps + 1)
    expect(page.locator(".rl-bar")).to_contain_text(f"step {feed.steps} / 9")
    points = f"() => document.querySelector('.js-plotly-plot')._fullData.some(t => t.x && t.x.length === {feed.steps})"
    page.wait_for_function(points)
    select_step_2(page)
    assert f"run={RUN}" in page.url, "the run's label has moved on, the selection has not"
    assert stores.read_endpoint(live[0]) is not None


@pytest.fixture(scope="module")
def shop(live: tuple[Path, Feed]) -> None:
    """A shop's traces, a machine and an engine, sent to the collector of the live run as any exporter sends them."""
    _, feed = live
    start = time.time_ns() - 90 * SECOND
    for request in [*foreign.traces(start), *foreign.metrics(start, 1, {"rl.run.id": RUN})]:
        httpx.post(
            f"{feed.url}/v1/{request.signal}",
            content=request.message.SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
            timeout=60,
        ).raise_for_status()


@pytest.mark.usefixtures("shop")
def test_trace_opens_down_to_a_span(url: str, page: Page) -> None:
    """A foreign trace is found and opened; a click on a bar shows its span, markup as text; a link leads to another."""
    page.goto(f"{url}/traces")
    page.get_by_label("Span name").fill("orders")
    page.get_by_label("Span name").press("Enter")
    expect(page.get_by_text("1 trace, newest first")).to_be_visible()
    page.goto(f"{url}/traces?trace={foreign.BROKEN.hex()}")
    chart = page.locator(".js-plotly-plot").first
    expect(chart.locator(".point")).to_have_count(3)
    expect(chart.locator(".annotation-text").nth(2)).to_contain_text("SELECT orders")
    box = chart.locator(".point").nth(2).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(chart.locator(".hoverlayer > g")).not_to_have_count(0)
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".rl-note")).to_contain_text(foreign.MARKUP)
    assert "trace_span=" in page.url
    assert page.locator(".stHtml img").count() == 0
    page.get_by_role("button", name="settle in trace").click()
    expect(page.get_by_text(foreign.BATCH.hex())).to_be_visible()
    assert f"trace={foreign.BATCH.hex()}" in page.url


@pytest.mark.usefixtures("shop")
def test_timeline_leads_to_the_trace_of_its_step(url: str, page: Page) -> None:
    """The link opens the step's trace as a waterfall, also when another trace was open before."""
    page.goto(f"{url}/traces?trace={foreign.PAID.hex()}")
    expect(page.get_by_text(foreign.PAID.hex())).to_be_visible()
    page.get_by_role("link", name="Timeline").click()
    page.get_by_role("link", name="Trace of this step").click()
    expect(page.locator(".js-plotly-plot .annotation-text").first).to_contain_text("rl.loop")
    assert foreign.PAID.hex() not in page.url


@pytest.mark.usefixtures("shop")
def test_metrics_share_one_time_axis(url: str, page: Page) -> None:
    """Panels are drawn with steps behind them; the dead target is red; zooming one panel moves the other."""
    page.goto(f"{url}/metrics?of=Scraped")
    chart = page.locator(".js-plotly-plot").first
    expect(chart.locator(".subplot")).to_have_count(3)
    expect(page.locator(".rl-note")).to_contain_text("gone does not answer")
    assert chart.locator(".shapelayer path").count() > 3
    assert page.locator(".stHtml img").count() == 0
    middle, height = chart.evaluate("""chart => {
        const axes = chart._fullLayout, box = chart.getBoundingClientRect();
        return [box.left + axes.xaxis._offset + axes.xaxis._length / 2, box.top + axes.yaxis._offset + 60];
    }""")
    ranges = "chart => ['xaxis', 'xaxis2'].map(axis => String(chart._fullLayout[axis].range))"
    before = chart.evaluate(ranges)
    page.mouse.move(middle, height)
    page.mouse.down()
    page.mouse.move(middle + 120, height, steps=5)
    page.mouse.up()
    changed = f"before => ({ranges})(document.querySelector('.js-plotly-plot'))[0] !== before"
    page.wait_for_function(changed, arg=before[0])
    after = chart.evaluate(ranges)
    assert after[0] == after[1] != before[0]
