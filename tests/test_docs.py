"""What the docs say is so: every option is explained, every example that claims to run does, every link leads somewhere."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from support.scripts import Scripts

from farstep import autograd, errors, fsdp, optim, state
from farstep.cli import DESCRIPTION
from farstep.rpc import RpcOptions
from farstep.state.optim_roster import Composed, Seated

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def examples():
    for page in PAGES:
        text = page.read_text()
        for match in RUNNABLE.finditer(text):
            line = text[: match.start(1)].count("\n") + 1
            yield pytest.param(match[1], id=f"{page.relative_to(ROOT)}:{line}")


def test_readme_command_and_package_describe_farstep_alike():
    description = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    assert " ".join(DESCRIPTION.split()) == f"{description}."
    first = (ROOT / "README.md").read_text().split("\n\n")[1]
    assert " ".join(first.split()) == f"farstep is a{description[1:]}."


def test_every_option_is_explained():
    text = (ROOT / "docs" / "options.md").read_text()
    assert [f.name for f in fields(RpcOptions) if f"`{f.name}`" not in text] == []


def test_no_option_is_explained_that_does_not_exist():
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named <= {f.name for f in fields(RpcOptions)}


def test_every_error_is_explained():
    text = "".join(
        (ROOT / "docs" / page).read_text()
        for page in ("rpc.md", "autograd.md", "optim.md", "state.md", "checkpoint.md")
    )
    roots = {"FarstepError", "RpcError", "RemoteTraceback"}
    assert [name for name in errors.__all__ if name not in roots and f"| `{name}` |" not in text] == []


def test_every_function_of_autograd_is_explained():
    text = (ROOT / "docs" / "autograd.md").read_text()
    assert [name for name in autograd.__all__ if not re.search(rf"`(autograd\.)?{name}\b", text)] == []


def test_every_method_of_the_optimizer_is_explained():
    text = (ROOT / "docs" / "optim.md").read_text()
    named = (ROOT / "docs" / "named.md").read_text()
    sharded = (ROOT / "docs" / "sharded.md").read_text()
    own = [name for name in vars(optim.DistributedOptimizer) if not name.startswith("_")]
    assert [name for name in own if not re.search(rf"\b{name}\b", text)] == []
    assert [name for name in optim.__all__ if not re.search(rf"\b{name}\b", text + named + sharded)] == []
    of_state = {*vars(Seated), *vars(Composed)}  # what farstep.state asks of them
    own = [name for name in vars(optim.ShardedOptimizer) if not name.startswith("_") and name not in of_state]
    assert [name for name in own if not re.search(rf"\b{name}\b", sharded)] == []
    kinds = (optim.NamedOptimizer, optim.KeyedOptimizer, optim.KeyedOptimizerWrapper, optim.CombinedOptimizer)
    theirs = {name for kind in kinds for name in vars(kind) if not name.startswith("_")} - of_state
    assert [name for name in theirs if not re.search(rf"\b{name}\b", named)] == []


def test_every_name_of_state_is_explained():
    pages = ("state.md", "adapters.md", "optim_state.md", "fsdp.md")
    text = "".join((ROOT / "docs" / page).read_text() for page in pages)
    names = {*state.__all__, *fsdp.__all__}
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_architecture_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    house = ROOT / "src" / "farstep"
    modules = [
        path
        for part in ("rpc", "autograd", "optim", "state", "checkpoint")
        for path in (house / part).rglob("[!_]*.py")
        if path.parent.name != "tools"  # which are named as one
    ]
    assert [path.name for path in modules if path.name not in text] == []


def test_architecture_names_every_note():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [
        note for note in set(re.findall(r"\[Note: ([^\]]+)\]", source)) if f"| {note} |" not in text
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    scripts = Scripts(tmp_path_factory.mktemp("scripts") / "log")
    yield scripts
    scripts.close()


@pytest.mark.slow
@pytest.mark.timeout(200)  # a busy machine is slow; only a hang takes this long
@pytest.mark.parametrize("code", list(examples()))
def test_example_runs(code, tmp_path, scripts):
    script = tmp_path / "example.py"
    script.write_text(code)
    wrong = scripts.run(script)
    assert wrong is None, wrong


@pytest.mark.slow
def test_an_example_that_fails_is_noticed(tmp_path, scripts):
    script = tmp_path / "example.py"
    for code, wanted in (
        ("assert 1 == 2", "AssertionError"),
        ("raise SystemExit(3)", "ended with 3"),
        ("", None),
    ):
        script.write_text(code)
        wrong = scripts.run(script)
        assert wrong is None if wanted is None else wanted in wrong
