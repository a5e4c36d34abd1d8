"""Makes the pictures of the docs: ``python -m tests.dashboard.screenshots`` (or ``make screenshots``).

A job trains, with errors and a call that hangs, and a real browser looks at its page. Needs chromium and pngquant.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from farprop.dashboard.server import Server
from farprop.dashboard.sources import Outside
from tests.dashboard import busy_job
from tests.dashboard.browser import SIZES, browser
from tests.support import forkserver
from tests.support.workers import processes

_OUT = Path(__file__).parents[2] / "docs" / "images"
_SECONDS = 25.0  # so that the drawings over time are full
_MOST_BYTES = 200_000
_IS_GOOD = """
    document.querySelectorAll(".card").length === 5 && !document.querySelector(".card.silent")
    && [...document.querySelectorAll(".matrix tbody td")].every((cell) => parseFloat(cell.textContent) > 5)
    && document.querySelectorAll(".matrix tbody td").length === 6
    && document.querySelector("#passes tbody") && document.querySelector("#calls .why")
"""


def main() -> None:
    _OUT.mkdir(exist_ok=True)
    ranks = range(len(busy_job.NAMES))
    with processes(len(ranks), env={"FARPROP_JOB_NAME": "train"}, timeout=180, check=False) as job:
        for joining in [job.start(rank, busy_job.join, rank) for rank in ranks]:
            joining.result()
        leaving = [job.start(rank, busy_job.leave) for rank in ranks if rank > 1]
        work = [job.start(rank, busy_job.train, busy_job.NAMES[rank]) for rank in (0, 1)]
        work.append(job.start(1, busy_job.hang))
        server = Server(Outside("train"), "127.0.0.1", 0)
        _take(server.url)
        server.stop()
        for rank in ranks:
            job.run(rank, busy_job.end)
        for done in [*work, *leaving, *(job.start(rank, busy_job.leave) for rank in (0, 1))]:
            done.result()
    forkserver.stop_servers()


def _take(url: str) -> None:
    with browser() as chromium:
        pages = {}
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                context = chromium.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme="dark" if theme == "dark" else "light",
                    reduced_motion="reduce",
                )
                page = pages[size, theme] = context.new_page()
                page.goto(url)
                page.wait_for_selector("article.card")
        time.sleep(_SECONDS)
        for (size, theme), page in pages.items():
            while not page.evaluate(_IS_GOOD):  # the machine may be busy with something else
                page.wait_for_timeout(100)
            path = _OUT / f"dashboard-{size}-{theme}.png"
            # The whole page on a laptop, the first screens on a phone.
            clip = {"x": 0, "y": 0, "width": 390, "height": 1700} if size == "phone" else None
            page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
            subprocess.run(["pngquant", "--force", "--speed", "1", "--output", path, "128", path], check=True)
            nbytes = path.stat().st_size
            print(f"{path.name}: {nbytes / 1000:.0f} kB")
            if nbytes > _MOST_BYTES:
                sys.exit(f"{path.name} is larger than {_MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
