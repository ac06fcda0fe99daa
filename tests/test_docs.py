"""The README and the pages of docs/: their code runs, their links lead somewhere."""

import copy
import importlib.util
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import output_of_torchrun, same_bits

import purescale as ps
from purescale.testing import assert_scale_rule

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("*/README.md"))]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def run(name, without=()):
    """What a page defines, its blocks run in turn, but for the sections `without`."""
    namespace = {"__name__": "page"}
    for section in re.split(r"^## ", PAGES[name].read_text(), flags=re.M):
        if section.splitlines()[0] not in without:
            for block in re.findall(r"```python\n(.*?)```", section, re.S):
                exec(compile(block, name, "exec"), namespace)
    return namespace


# Of the recipes, what nothing else there builds on.
LONG = ("A character GPT whose lengths change",)


WITH_CODE = [name for name, path in PAGES.items() if blocks(path)]


ONE_RANK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "docs/recipes.md" else n for n in WITH_CODE],
)
def test_the_python_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable, value in ONE_RANK.items():  # as torchrun tells a process
        monkeypatch.setenv(variable, value)
    run(name)


def output_of_script(page, folder):
    """Run the first block of a page by the command that stands there, and return what it prints."""
    command = re.search(r"^OMP_NUM_THREADS=1 torchrun (.*) train.py$", page.read_text(), re.M)
    (folder / "train.py").write_text(blocks(page)[0])
    arguments = [*command[1].split(), "train.py"]
    return output_of_torchrun(*arguments, paths=[str(ROOT)], cwd=folder)


@pytest.mark.slow
def test_the_script_that_scaling_up_begins_with_trains_over_two_ranks(tmp_path):
    page = PAGES["docs/scaling.md"].read_text()
    printed = output_of_script(PAGES["docs/scaling.md"], tmp_path)
    loss, steps = re.fullmatch(r"loss (\S+), (\d+) steps, scale 65536\n", printed).groups()
    assert page.index("```python") < 200
    assert f"Two ranks take {steps} steps" in page
    assert float(loss) < 0.5
    assert (tmp_path / "state.pt").exists()


def test_the_loop_of_the_readme_is_short_and_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = run("README.md")
    assert torch.isfinite(namespace["loss"])
    assert isinstance(namespace["state"], ps.TrainState)
    assert same_bits(namespace["once"], namespace["again"])
    assert all(slope.isfinite().all() for slope in namespace["slopes"].values())
    assert all(len(block.strip().splitlines()) <= 28 for block in blocks(PAGES["README.md"]))


def test_the_two_columns_of_the_readme_train_to_the_same_weights_and_scale():
    setup, *_ = blocks(PAGES["README.md"])
    swap = PAGES["README.md"].read_text().split("<table>")[1].split("</table>")[0]
    of_torch, ours = re.findall(r"```python\n(.*?)```", swap, re.S)
    namespace = {}
    exec(compile(setup.split("apply, params")[0], "README.md", "exec"), namespace)
    trained = []
    for column in (of_torch, ours):
        names = namespace | {"model": copy.deepcopy(namespace["model"])}
        exec(compile(column, "README.md", "exec"), names)
        trained.append(names)
    assert trained[0]["scaler"].get_scale() == trained[1]["state"].scaler.scale
    for expected, tensor in zip(
        trained[0]["model"].parameters(), trained[1]["model"].parameters(), strict=True
    ):
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_pictures_of_the_pages_are_drawn_by_one_script(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import pictures

    monkeypatch.setattr(pictures, "STEPS", 6)
    pictures.main([str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    demo = {"digits.png"}  # of `make demo`
    assert drawn | demo == {path.name for path in (ROOT / "docs" / "images").iterdir()}
    pages = "".join(path.read_text() for path in PAGES.values())
    assert all(f"images/{name})" in pages for name in drawn | demo)


def test_every_picture_of_a_page_says_what_it_shows_and_is_small():
    for path in PAGES.values():
        for shown, file in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", path.read_text()):
            assert len(shown) > 40, file
            assert (path.parent / file).stat().st_size < 100_000, file


def test_the_rule_of_the_recipes_is_a_rule(tmp_path):
    recipe = next(block for block in blocks(PAGES["docs/recipes.md"]) if "OnlyDown" in block)
    (tmp_path / "recipe.py").write_text("import torch\n" + recipe.split("own: ps.Rule")[0])
    namespace = runpy.run_path(str(tmp_path / "recipe.py"), run_name="recipe")
    assert_scale_rule(namespace["OnlyDown"](8.0))
    assert len(recipe.split("@dataclass")[1].split("own: ps.Rule")[0].strip().splitlines()) <= 12


def test_an_average_of_the_weights_survives_donation():
    """The recipe, whose average starts as the weights."""
    recipe = next(
        block for block in blocks(PAGES["docs/recipes.md"]) if block.startswith("average = ")
    )
    donating = recipe.replace("rule=rule)", "rule=rule, donate=True)")
    assert donating != recipe
    optimizer, rule = ps.from_torch(torch.optim.SGD, lr=1.0), ps.NoScale()
    state = ps.init_train_state({"w": torch.ones(2)}, {}, optimizer, rule)
    given = {"ps": ps, "x": None, "y": None, "optimizer": optimizer, "rule": rule, "state": state}
    given["loss_fn"] = lambda params, buffers, batch: (params["w"].sum(), buffers)
    exec(compile(donating, "recipes.md", "exec"), given)
    torch.testing.assert_close(given["average"]["w"], torch.full((2,), 0.999))


@pytest.mark.slow
def test_the_gan_of_the_recipes_is_torchs_loop(tmp_path, monkeypatch):
    """In float32, with spectral norm and batch norm in it: what both passes do to both networks."""
    monkeypatch.chdir(tmp_path)
    page = PAGES["docs/recipes.md"].read_text()
    exact = page.replace('"compute=autocast(float16),output=float32"', '"compute=float32"')
    assert exact != page
    monkeypatch.setitem(PAGES, "docs/recipes.md", tmp_path / "recipes.md")
    (tmp_path / "recipes.md").write_text(exact)
    recipe = run("docs/recipes.md", LONG)
    g, d = recipe["generator"], recipe["discriminator"]  # which no step has touched
    of_g, of_d = (torch.optim.Adam(n.parameters(), lr=2e-4, betas=(0.5, 0.999)) for n in (g, d))
    for real, noise in recipe["gan_batches"]:
        of_d.zero_grad()
        fake = g(noise).detach()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()).backward()
        of_d.step()
        of_g.zero_grad()
        F.softplus(-d(g(noise))).mean().backward()
        of_g.step()
    for net, state in ((g, recipe["g_state"]), (d, recipe["d_state"])):
        expected = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        assert state.step == 3
        torch.testing.assert_close(
            {**state.params, **state.buffers},
            {name: tensor.detach() for name, tensor in expected.items()},
            rtol=1e-4,
            atol=1e-6,
        )


def anchors(path):
    """The headings of a page as GitHub names them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES.values(), *OTHERS], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_something_here(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = Path(os.path.normpath(path.parent / file)) if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_listed_on_the_first():
    first = PAGES["docs/index.md"].read_text()
    listed = re.findall(r"^- \[[^]]+\]\((\w+\.md)\)", first, re.M)
    there = {path.name for name, path in PAGES.items() if name.startswith("docs/")}
    assert sorted(listed) == sorted(there - {"index.md"})


@pytest.mark.parametrize("path", [*PAGES.values(), *OTHERS], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_shows_nothing_that_only_sphinx_reads(path):
    """On a code host `{modules}` and `{toctree}` are what they look like."""
    text = path.read_text()
    assert not re.findall(r"^(?:```)?\{[\w-]+\}", text, re.M)


@pytest.fixture(name="site")
def _site(tmp_path, monkeypatch):
    """The hooks of the site, beside a copy of its pages, and what they make of four of them."""
    hooks = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    site = {"HERE": tmp_path / "docs"}
    site |= {"NOTEBOOKS": site["HERE"] / "notebooks", "GROUPS": site["HERE"] / "reference"}
    for name in ("README.md", "notebooks"):
        (tmp_path / name).symlink_to(ROOT / name)
    site["HERE"].mkdir()
    hooks["setup"].__globals__.update(site)
    hooks["_make_pages"](None, None)
    for page in ("index", "reference", "modules", "recipes"):
        source = [PAGES[f"docs/{page}.md"].read_text()]
        hooks["_sources"](None, page, source)
        site[page] = source[0]
    return site


def test_the_menu_of_the_site_has_the_guides_the_reference_and_the_notebooks(site):
    menu = site["index"]
    guides = "guide", "a_loop_that_stays", "recipes", "the_update", "gpu"
    assert ":caption: Guides\n:hidden:\n\n" + "\n".join(guides) + "\n" in menu
    assert "\nreference\nreference/01_a_module_as_a_function\n" in menu
    assert "notebooks/11_the_derivative_of_a_run\n" in menu
    assert menu.count("{toctree}") == 5


def test_each_public_name_is_on_one_page_of_the_reference(site):
    text = "".join(path.read_text() for path in site["GROUPS"].iterdir())
    documented = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", text, re.M)
    modules = {"interop", "simulate", "testing"}
    assert sorted(documented) == sorted(set(ps.__all__) - modules)
    assert "## `purescale.interop.apex`" in site["modules"]
    assert "## `purescale.testing`" in site["modules"]


def test_the_reference_lists_the_names_of_the_index_as_they_are(site):
    page = PAGES["docs/reference.md"].read_text()
    hooks = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert page == hooks["list_names"](page), "run `python docs/conf.py`, which writes the list"
    named = re.findall(r"^    (\w+) ", page, re.M)
    assert sorted(named) == sorted(ps.__all__)
    assert "```text" not in site["reference"], "the site has links"
    assert ".. automodule:: purescale\n   :no-members:\n" in site["reference"]


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="make docs installs it")
def test_the_docstrings_become_pages(tmp_path):
    """Markdown in the docstrings, reStructuredText for Sphinx."""
    hooks = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    text = "Arguments:\n- `x`: one\n  line\n- `y_` and z_ * 2\n\nIn code:\n\n    x = 1\n\n"
    lines = (text + "| a | b |\n|---|---|\n| 1 | 2 |\n").split("\n")
    hooks["_as_rst"](None, "function", "f", None, {}, lines)
    text = "\n".join(lines)
    assert "Arguments:\n\n- `x`: one\n  line\n- `y_` and z\\_ \\* 2\n" in text
    assert "In code:\n\n::\n\n    x = 1\n" in text
    assert "   * - a\n     - b\n   * - 1\n     - 2\n" in text
