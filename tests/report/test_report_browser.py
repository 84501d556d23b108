"""The report in a real headless Chromium, over its debugging pipe: quiet, offline, and fits a phone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_train.report.comparison_page import write_comparison
from dspark_train.report.run_page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"
)


class Browser:
    """One Chromium page, spoken to in the DevTools protocol over a pipe."""

    def __init__(self, profile: Path) -> None:
        self.read_end, to_us = os.pipe()
        from_us, self.write_end = os.pipe()

        def wire() -> None:
            # the browser reads commands from 3 and answers on 4; copies first, as 3 or 4 may be either end
            source, sink = os.dup(from_us), os.dup(to_us)
            os.dup2(source, 3)
            os.dup2(sink, 4)

        self.process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=wire,
        )
        os.close(from_us)
        os.close(to_us)
        self.buffer, self.count, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.read_end)
        os.close(self.write_end)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.read_end, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("chromium does not answer")
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        request: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write_end, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            message = self._message(deadline)
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def show(self, path: Path, *, width: int, height: int, dark: bool) -> None:
        """Open a file in a window of that size and scheme and wait until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message(deadline))

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def complaints(self) -> list[str]:
        """Everything that a console would show, and every request beyond the page itself."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        found = [json.dumps(event["params"]) for event in self.events if event.get("method") in names]
        for event in self.events:
            if event.get("method") == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(url)
        return found

    def screenshot(self, path: Path) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    twin = folder / "other"
    shutil.copytree(run_folder, twin)
    return {
        "run": write_report(run_folder, folder / "run.html"),
        "comparison": write_comparison([run_folder, twin], folder / "comparison.html"),
    }


@pytest.mark.parametrize("name", ["run", "comparison"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False), (360, True)])
def test_page_opens_quietly_and_fits(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.show(pages[name], width=width, height=800, dark=dark)
    assert browser.complaints() == []
    # nothing sticks out sideways: wide tables scroll inside their own frame
    assert browser.value("document.documentElement.scrollWidth") <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    channels = [int(v) for v in background.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (max(channels) < 64) if dark else (min(channels) > 224)


def test_charts_keep_readable_text_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["run"], width=360, height=740, dark=False)
    smallest = browser.value(
        "Math.min(...[...document.querySelectorAll('svg.chart text')].map("
        "t => parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getBoundingClientRect().width"
        " / t.ownerSVGElement.viewBox.baseVal.width))"
    )
    assert smallest >= 8.0  # CSS pixels on the screen


def test_chart_labels_do_not_overlap(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["run"], width=1280, height=800, dark=False)
    overlaps = browser.value(
        """(() => { const bad = [];
        for (const svg of document.querySelectorAll('svg.chart')) {
          const texts = [...svg.querySelectorAll('text')];
          const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
          for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
            const [a, b] = [boxes[i][1], boxes[j][1]];
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
              bad.push(svg.getAttribute('aria-label') + ': ' + boxes[i][0] + ' / ' + boxes[j][0]);
          } }
        return bad; })()"""
    )
    assert overlaps == []


def test_untrusted_text_is_shown_not_run(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["run"], width=1280, height=800, dark=False)
    assert browser.value("document.querySelectorAll('script').length") == 0
    prompts = browser.value("[...document.querySelectorAll('.prompt')].map(p => p.textContent)")
    assert any("<script>alert('x')</script>" in prompt for prompt in prompts)
