"""A page in a real browser, Chromium without a window: where its parts are."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
_FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars".split()
# figures are put into the page, so that their texts have places, too
_OUTER = """
<iframe width="{width}" height="9000" style="border: 0" srcdoc="{page}"></iframe>
<script>
function measure(document) {{
  const width = document.documentElement.clientWidth, out = {{figures: [], wide: []}};
  for (const image of document.querySelectorAll('figure img')) {{
    const box = document.createElement('div');
    const bytes = Uint8Array.from(atob(image.src.split(',')[1]), c => c.charCodeAt(0));
    box.innerHTML = new TextDecoder().decode(bytes).replace(/^[^]*?<svg/, '<svg');
    box.firstChild.setAttribute('width', '100%');
    box.firstChild.removeAttribute('height');
    box.title = image.alt;
    image.replaceWith(box);
  }}
  {spoil}
  for (const e of document.querySelectorAll('main *, header *'))
    if (!e.closest('.scroll') && !e.closest('svg') && e.getBoundingClientRect().right > width + 0.5)
      out.wide.push(e.tagName + ' ' + e.textContent.slice(0, 40));
  for (const svg of document.querySelectorAll('figure svg')) {{
    const box = svg.getBoundingClientRect(), texts = [];
    const beside = [...svg.closest('.beside').querySelectorAll('.block, figure > *')]
      .map(e => e.getBoundingClientRect()).filter(b => b.top < box.bottom && b.bottom > box.top);
    for (const t of svg.querySelectorAll('text')) {{
      const b = t.getBoundingClientRect();
      texts.push({{text: t.textContent,
                  size: parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a,
                  box: [b.left - box.left, b.top - box.top, b.right - box.left, b.bottom - box.top]}});
    }}
    out.figures.push({{name: svg.parentNode.title, left: box.left, width: box.width,
                      beside: Math.max(...beside.map(b => b.right)),
                      height: box.height, texts}});
  }}
  const root = document.documentElement;
  out.page = [root.scrollWidth, root.clientWidth];
  out.tables = [...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth]);
  return out;
}}
onload = () => {{
  const seen = measure(document.querySelector('iframe').contentDocument);
  document.body.textContent = JSON.stringify(seen);
}};
</script>
"""


def find() -> str | None:
    """Where a Chromium is; GDN_CHROMIUM names another one."""
    named = os.environ.get("GDN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


def measured(page: Path, width: int, spoil: str = "", printed: bool = False) -> Any:
    """The places of a page's parts in a window of this width, in CSS pixels; `spoil` is
    JavaScript that changes the page before.
    """
    text = page.read_text()
    if printed:
        text = text.replace("@media print", "@media all")
    outer = page.with_name(f"{page.stem}-{width}.outer.html")
    outer.write_text(
        _OUTER.format(width=width, page=html.escape(text), spoil=spoil),
        encoding="utf-8",
    )
    command = [find(), *_FLAGS, "--window-size=1400,9000", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (seen,) = re.findall("<body>(.*)</body>", done.stdout, re.DOTALL)
    return json.loads(html.unescape(seen))
