"""A real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

SIZES = {"laptop": (1280, 900), "phone": (390, 844)}
WAIT_MS = 30_000

# Not the network: nothing of the browser's own may go out. Not /dev/shm: the check for leaks looks there.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser without a window. Skips the test if there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("there is no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        try:
            yield started
        finally:
            started.close()


class Tab:
    """A page of its own, as of somebody else's browser. It takes note of everything that must not happen."""

    def __init__(self, browser: Browser, size: str = "laptop", dark: bool = False) -> None:
        width, height = SIZES[size]
        self._context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",  # drawings that move all the time keep a processor busy
        )
        self._context.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page = self._context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        # That one is about tests, which look at the drawing.
        if message.type in ("error", "warning") and "willReadFrequently" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _on_request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    def open(self, url: str) -> Page:
        self.page.goto(url)
        self.page.wait_for_selector("article.card")
        return self.page

    def wait(self, condition: str) -> None:
        """Wait until this JavaScript is true."""
        # Playwright's own way to wait evaluates text inside of the page, which the page forbids.
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(condition):
            if time.monotonic() > deadline:
                pytest.fail(f"not so after {WAIT_MS / 1000:g} s: {condition}\n{self.page.inner_text('body')}")
            self.page.wait_for_timeout(20)

    def has_text(self, selector: str, text: str) -> None:
        """Wait until one of these elements has this text."""
        self.page.locator(selector).filter(has_text=text).first.wait_for()

    def close(self) -> None:
        self._context.close()

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None:
            assert self.problems == [], self.problems
            assert len(self.hosts) == 1, self.hosts  # nothing but the page's own server was asked
