"""What mkdocs does when it builds the site (mkdocs.yml): a link that leaves docs/ becomes the path it stands for, and
names in tables break at their joints.

In the repository such links lead to a plugin, an example or a file of the core; the site has none of these. With them
out of the way `mkdocs build --strict` can be strict: every link that is left has to lead somewhere.
"""

from __future__ import annotations

import posixpath
import re

CELL = re.compile(r"(<t[dh][^>]*>)(.*?)(?=</t[dh]>)", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+")
LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)\s]+)\)")


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """The page's text, for mkdocs."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def plain(found: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(here, found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]} (`{path}`)"

    return LINK.sub(plain, markdown)


def on_page_content(html: str, **_: object) -> str:
    """The page, for mkdocs: a long name in a narrow column may break after _, . and /, and nowhere else (site.css)."""
    def jointed(cell: re.Match) -> str:
        return cell[1] + CODE.sub(lambda code: re.sub(r"(?<=\w[_./])(?=\w)", "<wbr>", code[0]), cell[2])

    return CELL.sub(jointed, html)
