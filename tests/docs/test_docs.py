"""What the documents name exists."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "engine", "broker", "services", "proxy", "launch")
DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def resolve(name: str) -> object:
    """The module, class or function of a dotted name. Raises AttributeError or ModuleNotFoundError."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_function_of_the_walk_exists() -> None:
    names = DOTTED.findall((ROOT / "docs" / "one-request.md").read_text())
    assert len(names) > 20
    for name in names:
        assert resolve(name) is not None


def test_the_walk_takes_ten_steps_or_fewer() -> None:
    steps = re.findall(r"^\d+\. ", (ROOT / "docs" / "one-request.md").read_text(), re.MULTILINE)
    assert 0 < len(steps) <= 10


def test_pages_and_messages_install_what_there_is_and_no_package_of_an_index() -> None:
    """The project is not published: it comes from a clone, or from the wheel of `make dist`."""
    code = [path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")]
    texts = {path: path.read_text() for path in (*PAGES, *code)}
    assert not [path for path, text in texts.items() if re.search(r"pip install '?triptych\[", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in LINK.findall(prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_documents_exist(page: Path) -> None:
    """Every `triptych …` and `make …` in a fenced block names a command or target that there is."""
    from typer.main import get_command

    from launch.cli.app import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in re.findall(r"```(?:sh|bash|shell|console)?\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            words = line.removeprefix("$ ").split()
            if words[:1] == ["triptych"] and len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in commands, line
            if words[:1] == ["make"] and len(words) > 1 and "=" not in words[1]:
                assert words[1] in targets, line


@pytest.mark.parametrize("name", ["add-a-request-field", "add-a-transport"])
def test_the_files_of_a_walk_exist(name: str) -> None:
    text = (ROOT / "docs" / "how-to" / f"{name}.md").read_text()
    paths = re.findall(r"`([\w./-]+\.(?:py|json|md|toml))`", text)
    files = {path for path in paths if "/" in path or path.endswith((".md", ".toml"))}
    assert len(files) > 5
    for path in files:
        assert (ROOT / path).is_file(), path


def test_the_walk_of_a_request_field_names_the_places_of_a_field_that_exists() -> None:
    """The files with `no_repeat_ngram_size`, which goes through all of the walk but one route."""
    text = (ROOT / "docs" / "how-to" / "add-a-request-field.md").read_text()
    for folder in ("common", "engine", "proxy", "docs/reference"):
        for path in (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")):
            if "no_repeat_ngram_size" in path.read_text():
                assert f"`{path.relative_to(ROOT)}`" in text, path


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """What a person sees, in the first column, is found in the product's source."""
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    messages.remove("triptych: command not found")  # the shell's
    assert len(messages) == 5
    for message in messages:
        assert message.partition(" (")[0] in source, message


def test_the_supported_versions_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "reference" / "supported.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(">=3.11,")
    worker = project["optional-dependencies"]["worker"]
    assert "torch>=2.9,<3" in worker
    assert "transformers>=5.17,<6" in worker
    for text in ("| 2.9 up to, not including, 3 |", "| 5.17 up to, not including, 6 |", "| 3.11: all tests."):
        assert text in page


def test_messages_of_the_errors_page_exist() -> None:
    """Every message and event is found in the product's source, piece by piece between its values."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    answers, _, others = page.partition("## At start")
    messages = re.findall(r"^\| `([^`]+)`", others, re.MULTILINE)
    for row in re.findall(r"^\| (?:\d.*?)?\| (`.*?) \| ", answers, re.MULTILINE):
        messages += re.findall(r"`([^`]+)`", row)
    source = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert len(messages) > 50
    for message in messages:
        for piece in message.split("…"):
            assert piece in source, message
