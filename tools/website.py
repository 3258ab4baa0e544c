"""Write the documentation as a website that works from disk: pages, search, dark mode, no network.

    python tools/website.py [FOLDER]          # or: make site. Writes to `site` and checks every link

The pages are README.md and docs/*.md as they are. `SECTIONS` is the navigation; `website/` holds the
template, the style and the script. Everything is made with packages that rich and torch bring along.

Invariant: a link that leads nowhere, or a page outside the navigation, is named and ends with exit code 1.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).with_name("website")

SECTIONS = {
    "Learn": ("README", "start", "precision", "plan"),
    "How to": (
        *("check", "audit", "drift", "simulate"),
        *("train", "recipes", "migrating", "doors", "checkpoints", "weights", "pipelines"),
    ),
    "Reference": ("config", "job", "deepspeed", "api", "errors", "support"),
    "Explained": ("engine", "order", "updates", "benchmarks", "architecture"),
    "Project": ("CHANGELOG", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "examples/README"),
}
"""Heading of the navigation -> names of its pages."""

NAMES = {"README": "zerodrift", "CHANGELOG": "Changes", "examples/README": "Examples"}
"""Names in the navigation that are not the heading of the page."""

STYLES = {"light": "default", "dark": "github-dark"}
"""Styles of pygments."""


@dataclass
class Page:
    source: Path
    address: str
    """File name on the site."""
    section: str
    title: str = ""
    name: str = ""
    """Name in the navigation."""
    body: str = ""
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    """(level, anchor, text) of each heading below the first."""
    passages: list[tuple[str, str, str]] = field(default_factory=list)
    """(anchor, heading, text) of each section, for the search."""
    links: list[str] = field(default_factory=list)

    @property
    def anchors(self) -> set[str]:
        return {anchor for _, anchor, _ in self.headings}


def main(folder: Path) -> int:
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = {page.source: page for page in _pages()}
    for page in pages.values():
        _render(page, pages)
    wrong = [*_not_in_the_navigation(pages), *_dead_links(pages)]
    environment = Environment(loader=FileSystemLoader(PARTS), autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("page.html")
    in_order = list(pages.values())
    for place, page in enumerate(in_order):
        before = in_order[place - 1] if place else None
        after = in_order[place + 1] if place + 1 < len(in_order) else None
        shown = template.render(page=page, pages=in_order, sections=SECTIONS, before=before, after=after)
        (folder / page.address).write_text(shown, encoding="utf-8")
    for name in ("site.css", "site.js"):
        shutil.copy(PARTS / name, folder)
    with (folder / "site.css").open("a", encoding="utf-8") as style:
        style.write(_code_colours())
    (folder / "search.js").write_text(_search_index(in_order), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "img", folder / "img")
    links = sum(len(page.links) for page in in_order)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"{folder / 'index.html'}: {len(pages)} pages, {links} links checked, {seconds:.1f} s")
    return 1 if wrong else 0


def _pages() -> Iterator[Page]:
    for section, names in SECTIONS.items():
        for name in names:
            at_top = (
                name.partition("/")[0] in ("README", "CHANGELOG", "CONTRIBUTING", "examples")
                or name.isupper()
            )
            source = ROOT / f"{name}.md" if at_top else ROOT / "docs" / f"{name}.md"
            address = "index.html" if name == "README" else f"{name.lower().replace('/readme', '')}.html"
            yield Page(source, address, section, name=NAMES.get(name, ""))


def _not_in_the_navigation(pages: dict[Path, Page]) -> Iterator[str]:
    for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]):
        if path not in pages:
            yield f"{path.relative_to(ROOT)}: is in no section of `SECTIONS` in tools/website.py"


# --- one page -----------------------------------------------------------------------------------------------


def _render(page: Page, pages: dict[Path, Page]) -> None:
    """Fill in everything of a page but its frame."""
    text = re.sub(r"<!--.*?-->\n?", "", page.source.read_text(encoding="utf-8"), flags=re.DOTALL)
    parser = MarkdownIt("commonmark", {"highlight": _code}).enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    _name_headings(page, tokens)
    _find_passages(page, tokens)
    for token in (each for one in tokens for each in (one, *(one.children or ()))):
        if token.type == "link_open":
            _lead(token, "href", page, pages)
        elif token.type == "image":
            _lead(token, "src", page, pages)
        elif token.type == "code_block":  # without a fence
            token.type, token.info = "fence", "text"
    body = parser.renderer.render(tokens, parser.options, {})
    body = re.sub(r'(src|srcset)="docs/img/', r'\1="img/', body)
    frame = '<div class="scroll" role="group" aria-label="Table" tabindex="0">'
    body = body.replace("<table>", f"{frame}<table>").replace("</table>", "</table></div>")
    page.body = re.sub(r"<th(?=[ >])", '<th scope="col"', body)


def _name_headings(page: Page, tokens: list[Token]) -> None:
    """Give headings the anchors that GitHub gives them, and a link to themselves."""
    for heading, inline in itertools.pairwise(tokens):
        if heading.type != "heading_open":
            continue
        text = "".join(
            child.content for child in inline.children or () if child.type in ("text", "code_inline")
        )
        anchor = re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-")
        while anchor in page.anchors:
            anchor += "-1"
        level = int(heading.tag[1])
        heading.attrSet("id", anchor)
        if level == 1 and not page.title:
            page.title, page.name = text, page.name or text
        page.headings.append((level, anchor, text))
        if level > 1 and inline.children is not None:
            link = Token("html_inline", "", 0)
            link.content = (
                f' <a class="anchor" href="#{anchor}" aria-label="Link to: {html.escape(text)}">#</a>'
            )
            inline.children.append(link)


def _find_passages(page: Page, tokens: list[Token]) -> None:
    anchor, heading, words = "", page.title, [""]
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            page.passages.append((anchor, heading, " ".join(words)))
            anchor = str(token.attrs["id"]) if token.tag != "h1" else ""
            heading, words = page.headings[len(page.passages) - 1][2], []
        elif token.type == "inline":
            words.append(
                "".join(child.content or " " for child in token.children or () if child.type != "html_inline")
            )
        elif token.type in ("fence", "code_block"):
            words.append(token.content)
    page.passages.append((anchor, heading, " ".join(words)))
    page.passages = page.passages[1:]


def _lead(token: Token, attribute: str, page: Page, pages: dict[Path, Page]) -> None:
    """Lead a link of the repository to its page on the site."""
    target = str(token.attrs[attribute])
    page.links.append(target)
    if re.match(r"[a-z]+:", target):
        token.attrSet("rel", "noopener")
        return
    path, mark, anchor = target.partition("#")
    found = (page.source.parent / path).resolve() if path else page.source
    if found in pages:
        token.attrSet(attribute, (pages[found].address if path else "") + mark + anchor)
    elif found.is_relative_to(ROOT / "docs" / "img"):
        token.attrSet(attribute, f"img/{found.relative_to(ROOT / 'docs' / 'img')}")
    elif token.type == "link_open":  # a file of the repository, which is not on the site
        token.attrs.pop("href")
        token.attrSet("title", f"{found.relative_to(ROOT)} in the repository")


def _dead_links(pages: dict[Path, Page]) -> Iterator[str]:
    for page in pages.values():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            found = (page.source.parent / path).resolve() if path else page.source
            known = pages.get(found)
            if not found.exists() or (anchor and known is not None and anchor not in known.anchors):
                yield f"{page.source.relative_to(ROOT)}: `{link}` leads nowhere"


# --- code and search --------------------------------------------------------------------------------------


def _code(text: str, language: str, _: Any) -> str:
    """Return highlighted code, whose copy button takes the commands of a console without their output."""
    name = language or "text"
    try:
        lexer = get_lexer_by_name({"console": "text"}.get(name, name))
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    shown = highlight(text, lexer, HtmlFormatter(nowrap=True))
    if name == "console":
        shown = re.sub(
            r"^\$ (.*)$", r'<span class="prompt">$ </span><span class="command">\1</span>', shown, flags=re.M
        )
    return f'<pre class="code" tabindex="0" data-language="{html.escape(name)}"><code>{shown}</code></pre>'


def _code_colours() -> str:
    light, dark = (HtmlFormatter(style=style) for style in STYLES.values())
    rules = dark.get_style_defs(".code")
    chosen = re.sub(r"^(?=\.code)", ':root[data-theme="dark"] ', rules, flags=re.M)
    by_system = re.sub(r"^(?=\.code)", ':root:not([data-theme="light"]) ', rules, flags=re.M)
    plain = light.get_style_defs(".code")
    return f"{plain}\n{chosen}\n@media (prefers-color-scheme: dark) {{\n{by_system}\n}}\n"


def _search_index(pages: list[Page]) -> str:
    """Return a script, because a page on disk may load a script but may not fetch a file."""
    found = [
        [
            page.address + (f"#{anchor}" if anchor else ""),
            page.title,
            heading,
            re.sub(r"\s+", " ", text)[:2000],
        ]
        for page in pages
        for anchor, heading, text in page.passages
    ]
    return f"window.searchIndex = {json.dumps(found, ensure_ascii=False)};\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
