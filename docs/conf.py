"""How `make docs` builds these pages; the reference comes from the package as it is imported."""

import inspect
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import purescale

HERE = Path(__file__).parent
NOTEBOOKS, GROUPS = HERE / "notebooks", HERE / "reference"  # made when the pages are built

project = "purescale"
version = release = purescale.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
napoleon_use_ivar = True  # the fields of a NamedTuple as one list
nb_execution_mode = "off"  # the notebooks have their outputs
html_theme = "furo"
html_title = "purescale"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["style.css"]
html_css_files = ["style.css"]

# A name in backticks is a link where there is something of that name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

_FIRST_PAGE = ("Install", "What a pure step gives")  # of the README
_TOCTREE = "```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{pages}\n```\n"
_AUTOMODULE = "```{{eval-rst}}\n.. automodule:: {name}\n   :{members}:\n```\n"
_LIST = "## The names\n"


def _sources(app: Any, page: str, source: list[str]) -> None:
    """What only Sphinx can show is added when the pages are built, so that they are plain Markdown
    on a code host; a Markdown file that is no page is offered as it is.
    """
    if page == "index":
        _, *lists = re.split(r"^(?=## )", source[0], flags=re.M)
        menu = _menu(source[0]).replace("reference\n", f"reference\n{_pages(GROUPS)}\n")
        menu += "\n" + _TOCTREE.format(caption="Notebooks", pages=_pages(NOTEBOOKS))
        source[0] = "\n".join([_of_the_readme(), *lists, menu])
    if page == "reference":  # with links in place of the plain list
        source[0] = source[0].partition(_LIST)[0] + _AUTOMODULE.format(
            name="purescale", members="no-members"
        )
    if page == "modules":
        found = pkgutil.walk_packages(purescale.__path__, "purescale.")
        names = sorted(
            name for _, name, _ in found if "._" not in name and name != "purescale.interop"
        )
        source[0] += "".join(
            f"\n## `{name}`\n\n{_AUTOMODULE.format(name=name, members='members')}" for name in names
        )
    source[0] = re.sub(r"\]\(\.\./(notebooks/\w+\.ipynb)\)", r"](\1)", source[0])
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)[^)]*\)", r"](path:\1)", source[0])


def _make_pages(app: Any, config: Any) -> None:
    """Copy the notebooks, and write a page for each group of public names."""
    for folder in (NOTEBOOKS, GROUPS):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        HERE.parent / "notebooks", NOTEBOOKS, ignore=shutil.ignore_patterns("*.md", ".*")
    )
    for path in NOTEBOOKS.glob("*.ipynb"):
        path.write_text(re.sub(r"\]\(\.\./docs/([\w/#-]+)", r"](../\1", path.read_text()))
    GROUPS.mkdir()
    for number, (heading, names) in enumerate(_groups().items(), 1):
        slug = re.sub(r"\W+", "_", heading.lower())
        text = "".join(map(_directive, names))
        (GROUPS / f"{number:02}_{slug}.md").write_text(
            f"# {heading}\n\n```{{eval-rst}}\n.. currentmodule:: purescale\n\n{text}```\n"
        )


def _groups() -> dict[str, list[str]]:
    """Return the headings of the index in the package's docstring, with the names below each."""
    parts = re.split(r"^(\S.*):\n", purescale.__doc__ or "", flags=re.M)[1:]
    groups = zip(parts[::2], parts[1::2], strict=True)
    names = {heading: re.findall(r"^    (\w+) ", text, re.M) for heading, text in groups}
    return {
        heading: [n for n in of if not inspect.ismodule(getattr(purescale, n))]
        for heading, of in names.items()
    }


def list_names(page: str) -> str:
    """Return the reference with the index in the package's docstring below its heading, for where
    it is read as plain Markdown.
    """
    index = (purescale.__doc__ or "").partition("\n\n")[2]
    return f"{page.partition(_LIST)[0]}{_LIST}\n```text\n{index.strip()}\n```\n"


def _directive(name: str) -> str:
    if inspect.isclass(getattr(purescale, name)):
        return f".. autoclass:: {name}\n   :members:\n\n"
    return f".. autofunction:: {name}\n\n"


def _pages(folder: Path) -> str:
    return "\n".join(f"{folder.name}/{path.stem}" for path in sorted(folder.iterdir()))


def _of_the_readme() -> str:
    """Return the beginning of the README and its first sections, with links from this folder."""
    first, *sections = re.split(r"^(?=## )", (HERE.parent / "README.md").read_text(), flags=re.M)
    by_heading = {section.splitlines()[0].removeprefix("## "): section for section in sections}
    text = first + "".join(by_heading[heading] for heading in _FIRST_PAGE)
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((examples|benchmarks|Makefile)", r"](../\1", text)


def _menu(text: str) -> str:
    """The headings of the first page and the pages listed below each, as the menu at the side."""
    headings = re.split(r"^## ", text, flags=re.M)[1:]
    return "\n".join(
        _TOCTREE.format(
            caption=heading.splitlines()[0],
            pages="\n".join(re.findall(r"^- \[[^]]+\]\((\w+)\.md\)", heading, re.M)),
        )
        for heading in headings
    )


def _as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The docstrings are written for `help()`; what reStructuredText wants otherwise."""
    text = "\n".join(lines)
    if name == "purescale":  # its index: a list under each heading
        text = re.sub(r"^    (\w+) +(\S.*)$", r"    - `~purescale.\1`: \2", text, flags=re.M)
    # a blank line before a list; code that is set apart by its indentation
    text = re.sub(r"^((?!- |  |\n).+)\n- ", r"\1\n\n- ", text, flags=re.M)
    text = re.sub(r"^((?!- |>>> )\S.*(?<!::))\n\n(?=    )", r"\1\n\n::\n\n", text, flags=re.M)
    # Only what stands in backticks is marked up: names_ and 2 * 3 are what they look like.
    parts = text.split("\n\n")
    for index, part in enumerate(parts):
        if not part.startswith((">>>", "    ", "..")):
            parts[index] = re.sub(r"(`[^`]*`)|((?<=\w)_(?!\w)|\*)", _plain, part)
    text = re.sub(r"(?:^\|.*\n)+", _table, "\n\n".join(parts), flags=re.M)
    lines[:] = text.split("\n")


def _plain(found: re.Match[str]) -> str:
    return found[1] or "\\" + found[2]


def _table(found: re.Match[str]) -> str:
    """A Markdown table as one of reStructuredText."""
    rows = [line.strip("| ").split(" | ") for line in found[0].splitlines()]
    out = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows[:1] + rows[2:]:
        out += [f"   {' ' if index else '*'} - {cell}" for index, cell in enumerate(row)]
    return "\n".join([*out, "", ""])


def _said_above(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool:
    """The docstring of a NamedTuple has its fields."""
    return skip or isinstance(obj, type(purescale.StepInfo.loss))


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("config-inited", _make_pages)
    app.connect("source-read", _sources)
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-skip-member", _said_above)


if __name__ == "__main__":
    path = HERE / "reference.md"
    path.write_text(list_names(path.read_text()))
