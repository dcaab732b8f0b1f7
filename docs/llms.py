"""Write docs/llms.txt: what there is to read, a line a page, for readers that are programs (llmstxt.org).

    python docs/llms.py            a test compares
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
LATER = ("flags.md", "log.md", "benchmarks.md", "reliability.md")
"""Long pages, for those who need them."""


def line(path: Path) -> str:
    """A page's title and its first sentence."""
    text = re.sub(r"<!--.*?-->\n*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    paragraphs = re.sub(r"```.*?```", "", text.split(title, 1)[1], flags=re.DOTALL).strip().split("\n\n")
    after = next(one for one in paragraphs if one.strip() and not one.startswith(("|", "Kind ", "#")))
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*]", lambda found: found[1] or "", " ".join(after.split()))
    plain = re.sub(r"^\d[\d, to]*: ", "", plain)
    sentence = re.match(r".+?[.:](?= |$)", plain)
    about = (sentence[0] if sentence else plain).rstrip(":.")
    return f"- [{title}]({path.relative_to(HERE).as_posix()}): {about}"


def text() -> str:
    """The file."""
    pages = sorted(path for path in (*HERE.glob("*.md"), *HERE.glob("tutorials/*.md")) if path.name != "index.md")
    lines = ["# Miles", "", "> Reinforcement-learning post-training for large language models: a small core that is a "
             "loop and a set of hooks, and plugins for everything with an opinion.", "", "## Docs", ""]
    lines += [line(path) for path in pages if path.name not in LATER]
    lines += ["", "## Hooks", "", *(line(path) for path in sorted((HERE / "hooks").glob("*.md")))]
    lines += ["", "## Optional", "", *(line(HERE / name) for name in LATER), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "llms.txt").write_text(text(), encoding="utf-8")
