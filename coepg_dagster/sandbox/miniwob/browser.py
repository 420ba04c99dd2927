"""A headless Chromium on MiniWoB++ pages: reset, screenshot, action, reward.

This module runs the browser process, makes pages look the same each time, and performs the three actions as real mouse
and key events. It does not choose actions.

The captured viewport is WIDTH × HEIGHT px at scale factor 1: the 160 × 210 task area and a white margin, so that both
sides are multiples of 28 and Qwen2.5-VL's resize is the identity.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import urllib.request
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from websocket import WebSocket, create_connection

from coepg_dagster.refusal import Refusal
from coepg_dagster.sandbox.miniwob.elements import ELEMENTS_JS, Element, from_dom
from coepg_dagster.sandbox.miniwob.splits import GENERAL_PAGE

WIDTH: Final = 168
HEIGHT: Final = 224
WINDOW: Final = (500, 240)
"""The window for which the pages were written, px: menus and dialogs position themselves by it. The upper left part is
captured."""

ActionType = Literal["CLICK", "TYPE", "SELECT"]
ACTION_TYPES: Final[tuple[ActionType, ...]] = ("CLICK", "TYPE", "SELECT")

FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-lcd-text",
    "--no-first-run",
    "--incognito",  # no history: else links are drawn as visited in later episodes
    "--disable-partial-raster",  # else single pixels depend on what was drawn before
    "--disable-features=BackForwardCache,PaintHolding",
    "--force-device-scale-factor=1",
    "--force-color-profile=srgb",
    "--lang=en-US",
)

PARKED: Final = (165.0, 220.0)
"""Where the pointer rests at the start of an episode, px: in the margin, over nothing."""

NEEDS_RELOAD: Final = frozenset({"form-sequence-3"})
"""Families whose page keeps state of the last episode: they are reloaded for each episode."""

STYLE: Final = """
* { caret-color: transparent !important; transition: none !important; animation: none !important;
    scroll-behavior: auto !important; }
html, body { background: #fff !important; overflow: hidden !important; }
#reward-display, #click-canvas, #sync-task-cover { display: none !important; }
html::before { content: ''; position: fixed; left: 160px; top: 0; width: 8px; height: 224px; background: #fff;
    z-index: 2147483647; pointer-events: none; }
html::after { content: ''; position: fixed; left: 0; top: 210px; width: 168px; height: 14px; background: #fff;
    z-index: 2147483647; pointer-events: none; }
"""
"""Hides everything except the task area; no blinking, no animation."""

PREPARE_JS: Final = r"""
async (style, seed) => {
  if (!window.coepgKept) {
    const sheet = document.createElement('style');
    sheet.textContent = style;
    document.head.appendChild(sheet);
    if (window.jQuery) {
      jQuery.fx.off = true;
      if (jQuery.ui && jQuery.ui.menu) jQuery.ui.menu.prototype.delay = 0;
    }
    const urls = new Set();
    for (const s of document.querySelectorAll('style'))
      for (const m of s.textContent.matchAll(/url\(([^)]+)\)/g)) urls.add(m[1].replace(/["']/g, ''));
    window.coepgKept = Array.from(urls, u => { const i = new Image(); i.src = u; return i; });
    await Promise.all(window.coepgKept.map(i => i.decode().catch(() => null)));
    await document.fonts.ready;
    core.EPISODE_MAX_TIME = 1e8;
  } else {
    if (document.activeElement) document.activeElement.blur();
    for (const e of document.querySelectorAll('input, textarea')) { e.checked = false; e.value = e.defaultValue; }
    for (const e of document.querySelectorAll('*')) e.scrollTop = 0;
  }
  Math.seedrandom(seed);
  core.startEpisodeReal();
  await new Promise(r => setTimeout(r, 0));
  await new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)));
  return core.getUtterance();
}
"""
"""Fixes the look, loads the pictures that hovering would fetch later, seeds the page and starts the episode."""

SETTLE_JS: Final = """
async () => {
  await new Promise(r => setTimeout(() => setTimeout(r, 2), 0));
  await new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)));
  return [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL];
}
"""
"""Returns the outcome when pending zero-delay timers have run and a frame was drawn."""

SELECT_JS: Final = """
(x, y, value) => {
  const list = document.elementFromPoint(x, y);
  if (!list || list.tagName !== 'SELECT') return 0;
  const index = Array.from(list.options).findIndex(o => o.text === value);
  if (index < 0) return 0;
  list.focus();
  return index - list.selectedIndex;
}
"""
"""Focuses the list under a point; returns the index of option `value` minus that of the selected one, 0 where absent."""


class BrowserMissing(Refusal, RuntimeError):
    """Chromium, its driver or the MiniWoB++ pages are not installed."""


def find_programs() -> tuple[str, str]:
    """Paths of Chromium and its driver. Raises BrowserMissing with the remedy."""
    chromium = os.environ.get("COEPG_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    driver = os.environ.get("COEPG_CHROMEDRIVER") or shutil.which("chromedriver")
    if not chromium or not driver:
        missing = "Chromium" if not chromium else "chromedriver"
        raise BrowserMissing(
            f"{missing} was not found. Install it (Debian: apt-get install chromium chromium-driver) "
            "or set COEPG_CHROMIUM and COEPG_CHROMEDRIVER."
        )
    return chromium, driver


def find_pages() -> Path:
    """The folder of MiniWoB++ task pages in the installed package. Raises BrowserMissing with the remedy."""
    try:
        import miniwob
    except ModuleNotFoundError as error:
        raise BrowserMissing("The package miniwob is not installed: pip install 'coepg-dagster[miniwob]'.") from error
    return Path(str(miniwob.__file__)).parent / "html" / "miniwob"


class _DevTools:
    """Chromium's DevTools protocol on one page, one call at a time."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/json/list", timeout=20) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        self._socket: WebSocket = create_connection(pages[0]["webSocketDebuggerUrl"], timeout=30, suppress_origin=True)
        self._last = 0
        self._loaded: set[str] = set()  # loaders whose page has fired its load event

    def call(self, command: str, **parameters: object) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError with Chromium's message."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": command, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{command}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Page.lifecycleEvent" and message["params"]["name"] == "load":
            self._loaded.add(message["params"]["loaderId"])

    def navigate(self, url: str) -> None:
        """Loads a page and waits for the load event of this page; one of an earlier page may still arrive."""
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        while answer["loaderId"] not in self._loaded:
            self._note(json.loads(self._socket.recv()))
        self._loaded.clear()

    def evaluate(self, function: str, *arguments: object) -> Any:
        """The JSON value of a JavaScript function (async too) of `arguments`. Raises RuntimeError if it throws."""
        call = f"({function})(...{json.dumps(arguments)})"
        answer = self.call("Runtime.evaluate", expression=call, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def close(self) -> None:
        self._socket.close()


class Browser:
    """One Chromium on one episode at a time. Use as a context manager.

    The same (family, seed) and the same actions give the same page and the same pixels. Chromedriver starts and ends
    the browser; everything else goes through the DevTools protocol, which is several times faster.
    """

    def __init__(self) -> None:
        chromium, driver = find_programs()
        self._pages = find_pages()
        self._made = TemporaryDirectory(prefix="coepg-pages-")
        page = files(__package__).joinpath(f"templates/{GENERAL_PAGE}.html").read_text("utf-8")
        Path(self._made.name, f"{GENERAL_PAGE}.html").write_text(
            page.replace("BASE", f"{self._pages.as_uri()}/"), "utf-8"
        )
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in FLAGS:
            options.add_argument(flag)
        os.environ.setdefault("SE_OFFLINE", "true")
        self._driver = webdriver.Chrome(options=options, service=Service(driver))
        self._tools = _DevTools(self._driver.capabilities["goog:chromeOptions"]["debuggerAddress"])
        self._outcome = (False, 0.0)
        self._family = ""
        call = self._tools.call
        call("Page.enable")
        call("Page.setLifecycleEventsEnabled", enabled=True)
        call("Emulation.setDeviceMetricsOverride", width=WINDOW[0], height=WINDOW[1], deviceScaleFactor=1, mobile=False)
        call("Emulation.setTimezoneOverride", timezoneId="UTC")
        call("Emulation.setLocaleOverride", locale="en-US")
        call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        self._tools.close()
        self._driver.quit()
        self._made.cleanup()

    @property
    def version(self) -> str:
        """Chromium's version."""
        return str(self._driver.capabilities["browserVersion"])

    def reset(self, family: str, seed: int, reload: bool = True) -> str:
        """Starts episode `seed` of a task page and returns its goal. Raises ValueError for an unknown family.

        Without `reload`, a page that is open already starts its next episode by itself, which is several times
        faster. That gives the same episode except in families that keep state of the last one (NEEDS_RELOAD):
        these reload anyway.
        """
        page = (Path(self._made.name) if family == GENERAL_PAGE else self._pages) / f"{family}.html"
        if not page.is_file():
            raise ValueError(f"MiniWoB++ has no task {family!r} (looked for {page.name} in the installed package)")
        self._mouse("mouseMoved", PARKED)
        if reload or family != self._family or family in NEEDS_RELOAD:
            self._tools.navigate(page.as_uri())
            self._family = family
        goal = self._tools.evaluate(PREPARE_JS, STYLE, str(seed))
        self._outcome = (False, 0.0)
        return str(goal)

    def screenshot(self) -> Image.Image:
        """The viewport, WIDTH × HEIGHT px, RGB, each channel rounded to a multiple of 17 (see `reduce_colors`)."""
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        answer = self._tools.call("Page.captureScreenshot", format="png", optimizeForSpeed=True, clip=clip)
        image = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
        if image.size != (WIDTH, HEIGHT):
            raise RuntimeError(f"Chromium drew {image.size[0]} × {image.size[1]} px instead of {WIDTH} × {HEIGHT}")
        return reduce_colors(image)

    def elements(self) -> tuple[Element, ...]:
        """The visible elements in document order."""
        return from_dom(self._tools.evaluate(f"() => {{{ELEMENTS_JS}}}"))

    def run(self, function: str, *arguments: object) -> Any:
        """The JSON value of a JavaScript function in the page, for oracles. Must not change the page."""
        return self._tools.evaluate(function, *arguments)

    def act(self, action_type: ActionType, point: tuple[float, float], value: str = "") -> None:
        """One action at `point` (screenshot px) by real events, then waits until the page is still.

        CLICK clicks. TYPE clicks the point, selects what is there and types `value`. SELECT gives the <select> under
        the point the focus and reaches option `value` by arrow keys; nothing happens where there is no such list or
        option. Raises ValueError for a point outside the viewport or an unknown action.
        """
        x, y = point
        if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
            raise ValueError(f"point ({x}, {y}) lies outside the {WIDTH} × {HEIGHT} viewport")
        self._mouse("mouseMoved", point)
        if action_type == "CLICK":
            self._click(point)
        elif action_type == "TYPE":
            self._click(point)
            self._key("a", code="KeyA", number=65, modifiers=2, commands=["selectAll"])
            for character in value:
                self._key(character, text=character)
        elif action_type == "SELECT":
            below = int(self._tools.evaluate(SELECT_JS, x, y, value))
            for _ in range(abs(below)):
                self._key(*(("ArrowDown", "", "ArrowDown", 40) if below > 0 else ("ArrowUp", "", "ArrowUp", 38)))
        else:
            raise ValueError(f"unknown action {action_type!r}: one of {', '.join(ACTION_TYPES)}")
        done, reward = self._tools.evaluate(SETTLE_JS)
        self._outcome = (bool(done), float(reward))

    def outcome(self) -> tuple[bool, float]:
        """Whether the last action ended the episode, and the environment's raw reward (no time penalty)."""
        return self._outcome

    def _mouse(self, kind: str, point: tuple[float, float], **parameters: object) -> None:
        self._tools.call("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], **parameters)

    def _click(self, point: tuple[float, float]) -> None:
        self._mouse("mousePressed", point, button="left", buttons=1, clickCount=1)
        self._mouse("mouseReleased", point, button="left", buttons=0, clickCount=1)

    def _key(
        self,
        key: str,
        text: str = "",
        code: str = "",
        number: int = 0,
        modifiers: int = 0,
        commands: tuple[str, ...] | list[str] = (),
    ) -> None:
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        down = {"text": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        self._tools.call("Input.dispatchKeyEvent", type=kind, commands=list(commands), **common, **down)
        self._tools.call("Input.dispatchKeyEvent", type="keyUp", **common)


def reduce_colors(image: Image.Image) -> Image.Image:
    """Rounds each channel to the nearest of 16 levels (multiples of 17).

    Black, white and the pure colours stay as they are; the hundreds of greys at the edges of letters become sixteen.
    A palette PNG of the result is lossless, half as large, and equal on every machine with the same fonts.
    """
    pixels = np.asarray(image.convert("RGB"), dtype=np.uint16)
    return Image.fromarray(((pixels + 8) // 17 * 17).astype(np.uint8))
