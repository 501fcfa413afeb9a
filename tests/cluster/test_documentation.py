"""README and the quickstart hold what they promise: their commands are run, in their order.

A fenced `sh` or `python` block is run in a folder that looks like a fresh clone. Behind `sh`, `server` marks
what runs until its section (`##`) ends, `host=N` where. Hosts are network namespaces, each with a clone of
its own. `make` is looked up only: it is how these tests themselves were installed.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake.config import leaf_keys
from tests.cluster.harness import ROOT, STOP_DEADLINE_S, Server, eventually
from tests.cluster.namespaces import Host, Unavailable, two_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
README, QUICKSTART = ROOT / "README.md", ROOT / "docs/quickstart.md"
PORT = "8000"
ADDRESSES = {1: "10.0.0.1", 2: "10.0.0.2"}
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Block:
    """What a reader is told to run."""

    section: str
    language: str
    text: str
    is_server: bool
    host: int | None

    @property
    def is_make(self) -> bool:
        return self.text.startswith("make ")


def blocks(page: Path) -> list[Block]:
    found = []
    section = ""
    for match in re.finditer(r"(?ms)^## (.+?)$|^```(sh|python)([^\n]*)\n(.*?)^```$", page.read_text()):
        heading, language, marks, text = match.groups()
        if heading is not None:
            section = heading
            continue
        host = re.search(r"host=(\d)", marks)
        found.append(Block(section, language, text, "server" in marks, int(host[1]) if host else None))
    return found


def clone(at: Path) -> Path:
    """What has been cloned and installed, as far as commands look at it."""
    at.mkdir()
    for name in (".venv", "configs", "docs"):
        (at / name).symlink_to(ROOT / name)
    return at


def run(block: Block, folder: Path, path: str = "") -> str:
    command = ["bash", "-euc", block.text] if block.language == "sh" else [sys.executable, "-c", block.text]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_one_machine(run_dir: Path, tmp_path: Path) -> None:
    [start] = re.findall(r"(?m)^serve: .*\n\t\$\(BIN\)/mooncake-serve (.*)$", (ROOT / "Makefile").read_text())
    folder = clone(tmp_path / "clone")
    read = [*blocks(README), *(block for block in blocks(QUICKSTART) if block.section == "One machine")]
    with Server(*shlex.split(start), run_dir=run_dir) as server:
        texts = [
            run(_at(block, {f":{PORT}": f":{server.port}"}), folder) for block in read if not block.is_make
        ]
    assert sum("Paris" in text for text in texts) >= 3
    assert any("data: [DONE]" in text for text in texts)
    assert any("tokens of the prompt were in the KVCache pool" in text for text in texts)
    assert any(re.search(r'mooncake_requests_total\{outcome="finished"\} [1-9]', text) for text in texts)
    assert any("port: 8001" in text for text in texts)


def test_two_hosts(run_dir: Path, tmp_path: Path) -> None:
    read = [block for block in blocks(QUICKSTART) if block.section == "Two hosts"]
    folders = {number: clone(tmp_path / f"host{number}") for number in ADDRESSES}
    commands = tmp_path / "commands"
    commands.mkdir()
    copy = commands / "scp"  # `scp -p FILE HOST:FOLDER`, to the one that the page means
    copy.write_text(f'#!/bin/sh\ntest "$3" = {ADDRESSES[2]}:mooncake-serve/ && cp -p "$2" {folders[2]}\n')
    copy.chmod(0o755)
    texts: list[str] = []
    with contextlib.ExitStack() as running:
        try:
            hosts = dict(zip(ADDRESSES, running.enter_context(two_hosts()), strict=True))
        except Unavailable as reason:
            pytest.skip(str(reason))
        addresses = {ADDRESSES[number]: hosts[number].addresses[0] for number in ADDRESSES}
        for block in read:
            assert block.host is not None, block.text
            host, folder = hosts[block.host], folders[block.host]
            if block.is_server:
                running.enter_context(server_on(host, folder, run_dir, _at(block, addresses)))
            elif block.text.startswith("curl"):
                ready = _at(block, addresses).text.splitlines()[0] + " -f"
                with host.entered():
                    eventually(lambda ready=ready: _succeeds(ready), "the cluster is ready", DEADLINE_S)
                    texts.append(run(_at(block, addresses), folder))
            else:
                run(block, folder, str(commands))
    assert len(texts) == 1
    assert '"status":"ready"' in texts[0]
    assert "Paris" in texts[0]


@contextlib.contextmanager
def server_on(host: Host, folder: Path, run_dir: Path, block: Block) -> Iterator[None]:
    """A terminal of that host in which this runs, until Ctrl-C."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}
    with host.entered():
        process = subprocess.Popen(["bash", "-euc", f"exec {block.text}"], cwd=folder, env=environment)
    try:
        yield
        assert process.poll() is None, block.text
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _at(block: Block, places: dict[str, str]) -> Block:
    text = block.text
    for told, real in places.items():
        text = text.replace(told, real)
    return Block(block.section, block.language, text, block.is_server, block.host)


def _succeeds(command: str) -> bool:
    return subprocess.run(["bash", "-c", command], capture_output=True, timeout=DEADLINE_S).returncode == 0


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub names them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted([README, *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.stem)
def test_what_is_named_exists(page: Path) -> None:
    """Files and headings that are linked, targets of make, flags of mooncake-serve in its own commands."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        assert link.startswith(("http://", "https://")) or (page.parent / link).exists(), link
    for link, anchor in re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", text):
        assert anchor in anchors(page.parent / link if link else page), f"{link}#{anchor}"
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for target in re.findall(r"(?m)(?:^|`)make ([a-z][a-z-]*)", text):
        assert target in targets, f"make {target}"
    keys = {"-".join(path).replace("_", "-") for path in leaf_keys()}
    known = keys | {"host", "port", "config", "help", "print-config", "version"}
    known |= {"requests-per-minute", "max-concurrent"}
    for command in re.findall(r"mooncake-serve((?: [^\n`|]*\\\n)*[^\n`|]*)", text):
        for flag in re.findall(r"(?<!\S)--([a-z0-9-]+)", command.split("#")[0]):
            assert flag in known, f"--{flag}"
