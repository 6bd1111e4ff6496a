"""Hooks of the site. Files outside docs/ that pages link to become part of the site, so
that links work there and in the repository: Markdown as pages, source text as pages of
code, pictures, HTML and JSON unchanged.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!\w+:|[#/])([^\s"#?)]+)')
FIRST = "index.md"  # README.md is the first page
ALSO = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/README.md",
)  # part of the site even if nothing links to them
# right under a paragraph
LIST = re.compile(r"^((?![-*] |[|>#]|```|\d+\. |\s).+\n)(?=([-*]|1\.) )", re.MULTILINE)
AS_IT_IS = {".png", ".svg", ".html", ".json"}
# for others the suffix is the name
LANGUAGE = {".cu": "cuda", ".cuh": "cuda", ".h": "cpp"}


def in_repository(page: str) -> str:
    """A page's path in the repository. mkdocs gives paths relative to docs/; pages
    added by on_files have their own.
    """
    if page == FIRST:
        return "README.md"
    return (
        f"docs/{page}"
        if (ROOT / "docs" / page).is_file()
        else page.removesuffix(".source.md")
    )


def in_site(path: str) -> str:
    """The site's page or file for a file of the repository."""
    if path == "README.md":
        return FIRST
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if Path(path).suffix in {".md", *AS_IT_IS} else f"{path}.source.md"


def targets(page: str, text: str):
    """(match, path in the repository) of each link of a page that leads to a file. A
    folder means its README.
    """
    for match in LINK.finditer(text):
        path = posixpath.normpath(
            posixpath.join(posixpath.dirname(in_repository(page)), match[2])
        )
        yield (
            match,
            f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path,
        )


def on_files(files, config):
    for path in ALSO:
        files.append(
            File.generated(config, in_site(path), abs_src_path=str(ROOT / path))
        )
    todo = [file.src_uri for file in files.documentation_pages()]
    while todo:
        page = todo.pop()
        for _, path in targets(page, files.get_file_from_path(page).content_string):
            uri = in_site(path)
            if (
                path.startswith(("docs/", ".."))
                or not (ROOT / path).is_file()
                or files.get_file_from_path(uri)
            ):
                continue
            if uri.endswith(".source.md"):
                source = (ROOT / path).read_text(encoding="utf-8")
                suffix = Path(path).suffix
                code = f"``````{LANGUAGE.get(suffix, suffix[1:])}\n{source}\n``````\n"
                files.append(
                    File.generated(
                        config,
                        uri,
                        content=f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{code}",
                    )
                )
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                if uri.endswith(".md"):
                    todo.append(uri)
    return files


def on_page_markdown(markdown, page, config, files):
    """Point each link at its file's place in the site."""
    here = page.file.src_uri
    if in_repository(here) not in ("README.md", f"docs/{here}"):
        # pages for those who change gdn come after those for its users
        page.meta.setdefault("search", {})["boost"] = 0.2
    if here.endswith(".source.md"):
        return markdown
    paths = {match.start(): path for match, path in targets(here, markdown)}

    def moved(match):
        path = paths[match.start()]
        if files.get_file_from_path(in_site(path)) is None:
            return match[0]  # mkdocs --strict complains of it
        return match[1] + posixpath.relpath(
            in_site(path), posixpath.dirname(here) or "."
        )

    # GitHub accepts a list right under a paragraph, and nested lists indented by two
    # spaces; mkdocs does not
    return LIST.sub(
        r"\1\n",
        re.sub(r"^  (?=- )", "    ", LINK.sub(moved, markdown), flags=re.MULTILINE),
    )
