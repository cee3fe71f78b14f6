"""Headless Chromium on pages of the built documentation: what overflows, and screenshots."""

from __future__ import annotations

import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HEIGHT = 900

# The page in frames beside one another, each as wide as a screen: a page takes its frame for the screen.
# Listed is what reaches past the right border of a frame and is in nothing that scrolls by itself.
_FRAMES = """<!doctype html><meta charset="utf-8"><body style="margin:0;white-space:nowrap">
FRAMES<pre id="found"></pre>
<script>
function look(frame) {
  frame.contentDocument.querySelectorAll('details').forEach((one) => { one.open = !IS_PICTURE })
  const page = frame.contentDocument, width = page.documentElement.clientWidth
  const scrolls = (one) => one && one !== page.body && one !== page.documentElement &&
    (['auto', 'scroll', 'hidden', 'clip'].includes(frame.contentWindow.getComputedStyle(one).overflowX) ||
     scrolls(one.parentElement))
  const wide = [...page.body.querySelectorAll('*')].filter((one) => {
    const box = one.getBoundingClientRect()
    return box.width > 0 && box.right > width + 1 && box.left < width && !scrolls(one.parentElement)
  })
  return {
    width, content: page.documentElement.scrollWidth, title: page.title,
    wide: wide.map((one) => one.tagName + '.' + one.className + ': ' + one.textContent.trim().slice(0, 40)),
    cut: [...page.querySelectorAll('.bd-article pre')].filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => one.textContent.trim().slice(0, 60)),
    outside: [...page.querySelectorAll('.bd-article code')].filter((one) => {
      const box = one.getBoundingClientRect()
      return box.width > 0 && box.right > width + 1 && !one.closest('.pst-scrollable-table-container')
    }).map((one) => one.textContent.trim().slice(0, 60)),
    broken: [...page.images].filter((one) => !one.naturalWidth).map((one) => one.src),
  }
}
onload = () => setTimeout(() => {
  found.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(look))
  IS_PICTURE && found.remove()
}, 300)
</script>"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


class Browser:
    """Chromium, and a server of one folder on this machine."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address

    def measured(self, page: str, widths: Sequence[int]) -> list[dict[str, Any]]:
        """For each of ``widths`` of the screen: the title of ``page``, the ``width`` that it has, and that of
        its ``content``. ``wide`` lists elements that reach past the right border, ``cut`` blocks of code that
        are wider than their box, ``outside`` inline code that reaches past the border, ``broken`` pictures
        that are not there. Folded parts of the page are opened."""
        with self._framed(page, widths, is_picture=False) as address:
            dom = self._run("--dump-dom", address).decode()
        found = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
        assert found is not None, f"{page} did not load:\n{dom[:2000]}"
        return json.loads(html.unescape(found[1]))

    def screenshot(self, page: str, widths: Sequence[int], path: Path) -> None:
        """Writes what is seen of ``page`` at first, on screens of ``widths``, beside one another, as PNG."""
        with self._framed(page, widths, is_picture=True) as address:
            self._run(f"--screenshot={path}", f"--window-size={sum(widths)},{HEIGHT}", address)

    @contextmanager
    def _framed(self, page: str, widths: Sequence[int], is_picture: bool) -> Iterator[str]:
        frames = "".join(
            f'<iframe src="{page}" style="border:0;width:{width}px;height:{HEIGHT}px"></iframe>'
            for width in widths
        )
        text = _FRAMES.replace("FRAMES", frames).replace("IS_PICTURE", str(is_picture).lower())
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".html") as file:
            file.write(text)
            file.flush()
            yield f"{self._address}/{Path(file.name).name}"

    def _run(self, *arguments: str) -> bytes:
        with tempfile.TemporaryDirectory() as profile:
            options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
            times = ("--virtual-time-budget=8000", f"--user-data-dir={profile}")
            command = [chromium() or "chromium", *options, *times, *arguments]
            return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout


def chromium() -> str | None:
    """Returns the browser's command, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser_on(folder: Path) -> Iterator[Browser]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Browser(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
