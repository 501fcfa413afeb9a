"""Pages name what exists, and show commands as they can be typed.

`tests/cluster/test_documentation.py` runs these commands.
"""

import re
import subprocess
from pathlib import Path

import pytest

from mooncake.config.flags import SHORT_NAMES
from mooncake.config.settings import leaf_keys
from tests.deadline import DEADLINE_S
from tests.documented import NEEDS, PAGES, README, ROOT, anchor, blocks

PROGRAMS = r"mooncake-(?:serve|kv|doctor|bench|sim|plan|picker)|python3?|pip|pytest"
COMMANDS = rf"{PROGRAMS}|\.venv/bin/\S+|make|curl|docker|openssl|systemctl|sudo|scp"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {anchor(heading) for heading in headings}


@each_page
def test_what_is_named_exists(page: Path) -> None:
    """Files and headings that are linked, targets of make, flags of mooncake-serve in its own commands."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        assert link.startswith(("http://", "https://")) or (page.parent / link).exists(), link
    for link, heading in re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", text):
        assert heading in anchors(page.parent / link if link else page), f"{link}#{heading}"
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for target in re.findall(r"(?m)(?:^|`)make ([a-z][a-z-]*)", text):
        assert target in targets, f"make {target}"
    keys = {"-".join(path).replace("_", "-") for path in leaf_keys()}
    known = (
        keys
        | {name.removeprefix("--") for name in SHORT_NAMES.values()}
        | {"config", "help", "help-all", "print-config", "version"}
    )
    known |= {
        "requests-per-minute",
        "tokens-per-minute",
        "max-concurrent",
        "url",
        "heads",
        "layers",
        "sequences",
        "back",
    }
    for command in re.findall(r"mooncake-serve((?: [^\n`|]*\\\n)*[^\n`|]*)", text):
        for flag in re.findall(r"(?<!\S)--([a-z0-9-]+)", command.split("#")[0]):
            assert flag in known, f"--{flag}"


@each_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    folders = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."))
    text = re.sub(r"\w+://\S+", "", page.read_text())
    for path in re.findall(rf"(?<![\w./-])((?:{folders})/[\w./@*-]*\w)", text):
        assert [*ROOT.glob(path), *ROOT.glob(f"{path}.*")], path


@each_page
def test_names_stand_in_the_files_that_a_page_names_for_them(page: Path) -> None:
    """Such as "`checks` in `messenger/doctor/cli.py`"."""
    name = r"`[\w.]+`"
    placed = rf"({name}(?:(?:, | and ){name})*) in\s`((?:[\w-]+/)+[\w-]+\.\w+)`"
    for names, path in re.findall(placed, page.read_text()):
        words = {*re.findall(r"\w+", (ROOT / path).read_text())}
        for parts in re.findall(r"`([\w.]+)`", names):
            assert {*parts.split(".")} <= words, f"{parts} in {path}"


@each_page
def test_commands_can_be_typed(page: Path) -> None:
    """A terminal in a fresh clone finds the programs: none is on its PATH before `.venv` is named."""
    for block in blocks(page):
        if block.language == "sh":
            for command in block.commands:
                assert not re.search(rf"(?:^|[;|&(]\s*)(?:{PROGRAMS})(?!\S)", command), command
        elif not block.language:
            typed = re.search(rf"(?m)^\s*(?:{COMMANDS}) .*", block.text)
            assert typed is None, f"not marked as sh: {typed and typed[0]}"
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for inline in re.findall(r"`([^`\n]+)`", prose):
        assert not re.match(rf"(?:{PROGRAMS}) \S", inline), inline
    indented = re.search(rf"(?m)^    (?:{COMMANDS}) .*", prose)
    assert indented is None, f"in no sh block: {indented and indented[0]}"


@each_page
def test_what_tests_do_not_run_is_a_command_all_the_same(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            done = subprocess.run(
                ["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=DEADLINE_S
            )
            assert done.returncode == 0, f"{block.text}\n{done.stderr}"
            assert not re.search(r"(?<![\"\w.])\.\.\.(?!\")", block.text), (
                f"something is left out: {block.text}"
            )
        assert block.needs is None or block.needs in NEEDS, block.needs


def test_a_requests_path_can_be_read_in_an_afternoon() -> None:
    """The page names at most 40 files; a folder counts as all that it has."""
    text = (ROOT / "docs/request-path.md").read_text()
    named = {ROOT / path for path in re.findall(r"`((?:\w+/)+[\w.]*)`", text)}
    files = {file for path in named for file in (path.rglob("*.*") if path.is_dir() else [path])}
    assert 30 <= len(files) <= 40, sorted(str(file.relative_to(ROOT)) for file in files)


def test_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", README.read_text()))
    assert {page.name for page in PAGES if page != README} - linked == set()
