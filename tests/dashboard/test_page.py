"""The live page in a real browser, while a real job runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch
from playwright.sync_api import Browser

import farprop.rpc as rpc
from farprop.dashboard.server import Server
from farprop.dashboard.sources import Outside
from farprop.protocol.events import MOST_MESSAGE
from tests.dashboard import busy_job
from tests.dashboard.browser import Tab
from tests.inspection import functions as f
from tests.support.workers import cluster, processes

pytestmark = pytest.mark.one_transport
_SMALL = {"FARPROP_JOB_NAME": "small"}
_SERVED = "document.querySelector('[data-worker={}] .sides tbody td').textContent"


# A place of the task stream where a bar is.
_A_BAR = """() => {
    const canvas = document.querySelector(".stream canvas"), scale = devicePixelRatio;
    canvas.scrollIntoView({ block: "center" });
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const isBar = (x, y) => {
        const [r, g, b, a] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
        return a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60;
    };
    for (let y = 25; y < height - 25; y += 3)
        for (let x = width - 10; x > 80; x -= 1)
            if (isBar(x, y) && isBar(x - 1, y)) return [x / scale, y / scale];
}"""


@pytest.fixture(scope="module")
def busy(chromium: Browser) -> Iterator[str]:
    """A busy job with a call and a pass that hang; the address of its page."""
    with processes(len(busy_job.NAMES), env={"FARPROP_JOB_NAME": "busy"}, timeout=110) as job:
        for joining in [job.start(rank, busy_job.join, rank) for rank in range(len(busy_job.NAMES))]:
            joining.result()
        work = [job.start(rank, busy_job.train, busy_job.NAMES[rank]) for rank in (0, 1)]
        work += [job.start(0, busy_job.hang), job.start(1, busy_job.hang_in_backward)]
        server = Server(Outside("busy"), "127.0.0.1", 0)
        try:
            yield server.url
        finally:
            server.stop()
            for rank in range(len(busy_job.NAMES)):
                job.run(rank, busy_job.end)
            for done in work:
                done.result()
            for leaving in [job.start(rank, busy_job.leave) for rank in range(len(busy_job.NAMES))]:
                leaving.result()


@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_page_shows_a_busy_job(busy: str, chromium: Browser, size: str) -> None:
    with Tab(chromium, size) as tab:
        page = tab.open(busy)
        assert "token" not in page.url
        cards = page.locator("article.card")
        assert cards.count() == len(busy_job.NAMES)
        assert [cards.nth(at).get_attribute("data-worker") for at in range(cards.count())] == list(busy_job.NAMES)
        # Rates, and quantiles of times.
        tab.wait(f"parseFloat({_SERVED.format('params')}) > 0")
        tab.wait(
            r"/\d (µs|ms|s)$/.test(document.querySelectorAll('[data-worker=params] .sides tbody td')[2].textContent)"
        )
        tab.has_text("[data-worker=params] .facts", "MiB")
        # Who calls whom: the trainers call the others, and nobody else calls.
        tab.wait("document.querySelectorAll('.matrix tbody tr').length === 2")
        tab.wait("[...document.querySelectorAll('.matrix tbody td')].every(cell => parseFloat(cell.textContent) > 0)")
        # The task stream: lanes of all workers, bars in the colours of functions.
        tab.wait("Number(document.querySelector('#stream').dataset.slices) > 100")
        assert int(page.locator("#stream").get_attribute("data-lanes") or 0) >= len(busy_job.NAMES)
        tab.wait(
            "new Set(new Uint32Array(document.querySelector('.stream canvas').getContext('2d')"
            ".getImageData(64, 0, 800, 300).data.buffer)).size > 5"
        )
        tab.has_text(".legend", "pull_weights")
        # A call that hangs says why, where one looks first and in its row.
        sentence = "trainer0 waits for params.save_checkpoint"
        tab.has_text(".waits li", sentence)
        tab.has_text("#calls .why", sentence)
        tab.has_text("#calls .why", "params has been in busy_job.py")
        tab.has_text("#errors tbody", "FileNotFoundError")
        tab.has_text("#errors .message", "shard-")
        tab.has_text("#owners li", "params")
        tab.has_text("#references tbody", "embedding")
        tab.has_text("#passes tbody", "trainer1")
        tab.wait("document.querySelectorAll('.chart canvas').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert re.match(r"busy · [\d,.<]+/s · farprop", page.title())


def test_task_stream_can_be_zoomed_moved_and_asked(busy: str, chromium: Browser) -> None:
    with Tab(chromium) as tab:
        page = tab.open(busy)
        tab.wait("Number(document.querySelector('#stream').dataset.slices) > 100")
        canvas, live = page.locator(".stream canvas"), page.locator("#live")
        assert live.get_attribute("aria-pressed") == "true"
        canvas.focus()
        page.keyboard.press("ArrowLeft")
        tab.wait("document.querySelector('#live').getAttribute('aria-pressed') === 'false'")
        page.keyboard.press("+")
        live.click()
        tab.wait("document.querySelector('#live').getAttribute('aria-pressed') === 'true'")
        # Paused, a bar stays where it is, and says what it is. On a busy machine, what is drawn is late: there may be
        # no bar yet in what the pause keeps.
        deadline = time.monotonic() + 60
        while not page.locator(".tip").count():
            assert time.monotonic() < deadline
            page.locator("#pause").click()
            place = page.evaluate(_A_BAR)
            if place is not None:
                canvas.hover(position=dict(zip("xy", place, strict=True)))
            if not page.locator(".tip").count():
                page.locator("#pause").click()
                before = page.locator("#stream").get_attribute("data-slices")
                tab.wait(f"document.querySelector('#stream').dataset.slices !== '{before}'")
        tab.has_text(".tip", "thread")
        assert page.inner_text(".tip strong")


def test_theme_follows_the_system_and_can_be_chosen(busy: str, chromium: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with Tab(chromium) as light, Tab(chromium, dark=True) as dark:
        by_day = light.open(busy).evaluate(background)
        by_night = dark.open(busy).evaluate(background)
        assert by_day != by_night
        light.page.locator("#theme").click()
        assert light.page.evaluate(background) == by_night
        light.open(busy)  # it is remembered
        assert light.page.evaluate(background) == by_night


def test_several_pages_show_the_same(busy: str, chromium: Browser) -> None:
    with Tab(chromium) as first, Tab(chromium, "phone") as second:
        first.open(busy)
        second.open(busy)
        for tab in (first, second):
            tab.wait(f"parseFloat({_SERVED.format('params')}) > 0")
        first.close()
        second.page.evaluate("window.before = document.querySelector('#stream').dataset.slices")
        second.wait("document.querySelector('#stream').dataset.slices !== window.before")


def test_rates_grow_when_calls_run(chromium: Browser) -> None:
    with cluster(2, env=_SMALL) as job:
        server = Server(Outside("small"), "127.0.0.1", 0)
        try:
            with Tab(chromium) as tab:
                page = tab.open(server.url)
                tab.wait(f"{_SERVED.format('worker1')} === '0/s'")
                assert page.locator(".matrix").count() == 0
                assert "No worker has called another" in page.inner_text("main")
                job.run(0, _call_often)
                tab.wait(f"parseFloat({_SERVED.format('worker1')}) > 0")
                tab.has_text("#functions tbody", "add")
        finally:
            server.stop()


def _call_often() -> None:
    for _ in range(200):
        rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))


_EVIL_MESSAGE = "\u202e<script>document.title='owned'</script><b onmouseover=alert(1)>"
_EVIL = "<img src=x onerror=\"document.title='owned'\">"


class EvilError(Exception):
    pass


EvilError.__name__ = EvilError.__qualname__ = _EVIL


def _call_evil() -> None:
    def evil() -> None:
        pass

    def failing() -> None:
        raise EvilError(f"{_EVIL_MESSAGE}\x1b[2J{'m' * 2000}")

    for function in (evil, failing):
        function.__name__ = function.__qualname__ = _EVIL
    rpc.rpc_sync("worker1", evil)
    try:
        rpc.rpc_sync("worker1", failing)
    except Exception:
        pass


@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_names_and_messages_of_the_job_are_text(chromium: Browser, size: str) -> None:
    """A function or an exception may be called anything, and say anything, and nothing of it is HTML."""
    with cluster(2, env=_SMALL) as job:
        server = Server(Outside("small"), "127.0.0.1", 0)
        try:
            with Tab(chromium, size) as tab:
                page = tab.open(server.url)
                tab.wait(f"{_SERVED.format('worker1')} === '0/s'")
                job.run(0, _call_evil)
                tab.has_text("#functions tbody", "<img src=x onerror")
                tab.has_text("#errors tbody", "<img src=x onerror")
                tab.has_text("#errors .message", "?<script>document.title='owned'</script><b onmouseover")
                assert page.locator("#page :is(img, script, b)").count() == 0
                message = page.locator("#errors .message").first.inner_text()
                assert message.endswith("mm…")
                assert len(message) <= MOST_MESSAGE
                assert message.isprintable()
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
                table = "document.querySelector('#errors .scroll')"
                assert page.evaluate(f"{table}.scrollWidth - {table}.clientWidth") <= 0
                assert "owned" not in page.title().replace(_EVIL, "")
        finally:
            server.stop()


def test_browser_runs_no_script_that_is_not_the_pages(busy: str, chromium: Browser) -> None:
    with Tab(chromium) as tab:
        page = tab.open(busy)
        page.evaluate(
            "() => { const made = document.createElement('script'); made.textContent = 'window.owned = true';"
            " document.body.append(made); }"
        )
        assert page.evaluate("window.owned") is None
        assert all("Content Security Policy" in problem for problem in tab.problems)
        assert tab.problems
        tab.problems.clear()


def test_killed_worker_says_so(chromium: Browser) -> None:
    with cluster(3, env=_SMALL) as job:
        server = Server(Outside("small"), "127.0.0.1", 0)
        try:
            with Tab(chromium) as tab:
                tab.open(server.url)
                job.kill(2)
                tab.has_text("[data-worker=worker2].silent", "worker2")
                tab.has_text(".waits li", "worker2")
                assert tab.page.locator("article.card:not(.silent)").count() == 2
        finally:
            server.stop()


def test_page_says_that_the_job_has_ended_and_stays(chromium: Browser) -> None:
    with Tab(chromium) as tab:
        with cluster(2, env={"FARPROP_JOB_NAME": "short"}) as job:
            server = Server(Outside("short"), "127.0.0.1", 0)
            tab.open(server.url)
            job.run(0, _call_often)
            tab.has_text("#functions tbody", "add")
        try:
            tab.has_text(".status", "ended")
            tab.has_text("#functions tbody", "add")  # what was seen last
            assert "ended" in tab.page.title()
            with cluster(1, env={"FARPROP_JOB_NAME": "short"}):  # somebody starts it again
                tab.has_text(".status", "live")
                tab.wait("document.querySelectorAll('article.card').length === 1")
        finally:
            server.stop()


def test_page_comes_back_after_a_lost_connection(chromium: Browser) -> None:
    with cluster(1, env=_SMALL), Tab(chromium) as tab:
        server = Server(Outside("small"), "127.0.0.1", 0)
        tab.open(server.url)
        server.stop()
        tab.has_text(".status", "connection lost; trying again")
        tab.has_text("article.card", "worker0")  # what was seen last
        again = Server(Outside("small"), "127.0.0.1", server.port)
        again._access.token = server._access.token
        tab.has_text(".status", "live")
        again.stop()
        # One that does not know the page any more.
        other = Server(Outside("small"), "127.0.0.1", server.port)
        tab.has_text(".status", "this page's server has gone")
        other.stop()
        assert all("Failed to load resource" in problem for problem in tab.problems)
        tab.problems.clear()


def _serve_inside() -> str:
    import farprop.dashboard

    dashboard = f.references["dashboard"] = farprop.dashboard.start()  # type: ignore[assignment]
    return dashboard.url


def _stop_inside() -> None:
    f.references.pop("dashboard").stop()  # type: ignore[attr-defined]


def test_worker_serves_the_page_of_its_job(chromium: Browser) -> None:
    with cluster(2) as job:
        url = job.run(0, _serve_inside)
        with Tab(chromium) as tab:
            tab.open(url)
            waiting = job.start(0, rpc.rpc_sync, "worker1", f.wait_here, (), {}, 0)
            tab.has_text("#calls .why", "worker0 waits for worker1.wait_here")
            job.run(1, f.release)
            waiting.result()
            tab.has_text("#calls .empty", "No call is in flight")
        job.run(0, _stop_inside)
