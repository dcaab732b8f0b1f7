"""The page of a run: one HTML file that draws a JSON document. `miles report` writes it, `miles watch` serves it.

What generated text holds is never markup: the JSON is escaped so that it cannot leave its script element, and the page
sets text through textContent alone. The policy admits the page's own script, by its hash, and no other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = ("draw.js", "sections.js", "samples.js", "live.js", "page.js")


def render(title: str, data: object, *, live: bool = False) -> tuple[str, str]:
    """The page, and its content security policy.

    Args:
        data: the document, for strict JSON.
        live: whether the page asks its server for news.
    """
    script = "".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS if live or name != "live.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
              "base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if live else ""))
    filled = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": (FOLDER / "page.css").read_text("utf-8"),
              "DATA": _embedded(data), "SCRIPT": script}
    # Cut at the placeholders once rather than replace: a run's own text is never searched for them.
    page, template = [], (FOLDER / "page.html").read_text("utf-8")
    for name, text in filled.items():
        before, _, template = template.partition(f"__{name}__")
        page += [before, text]
    return "".join((*page, template)), policy


def _embedded(data: object) -> str:
    """JSON that can stand in a script element: no markup, no address that a scanner would take for a reference."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for char, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("//", "/\\/"), ("\u2028", "\\u2028"),
                         ("\u2029", "\\u2029")):
        text = text.replace(char, escape)
    return text
