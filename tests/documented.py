"""The commands and programs that README and the pages of docs/ tell a reader to type, as data.

A fenced `sh` block can be pasted into a terminal in a fresh clone. Marks behind `sh`:

- `server`: the command runs until its section (`##`) ends, in a terminal of its own
- `host=N`: the block is for that host of several
- `after=two-hosts`: the section continues the end of that section of the quickstart
- `needs=THING`: tests do not run the block, because THING is not available

A `python` block is a program, unless it is marked `excerpt`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
README, QUICKSTART = ROOT / "README.md", ROOT / "docs/quickstart.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md")])
MARKS = {"server", "excerpt"}
NEEDS = {"docker", "gpu", "rdma", "internet", "hours", "hosts", "systemd", "vllm", "kubernetes"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with its section and its marks."""

    section: str
    language: str
    text: str
    marks: frozenset[str] = frozenset()
    host: int | None = None
    after: str | None = None
    needs: str | None = None

    @property
    def is_server(self) -> bool:
        return "server" in self.marks

    @property
    def is_run(self) -> bool:
        """Whether a test runs the block.

        Blocks with `make` are not run: `make` has installed the tests themselves.
        """
        is_program = self.language in ("sh", "python") and "excerpt" not in self.marks
        return is_program and self.needs is None and not self.text.startswith("make ")

    @property
    def commands(self) -> Iterator[str]:
        """Yield the commands of the block: its lines without comments.

        A line that ends with a backslash is joined with the next line.
        """
        for line in self.text.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s)#\s.*", "", line).strip():
                yield command


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order. Raises ValueError for an unknown mark."""
    found = []
    section = ""
    for match in re.finditer(r"(?ms)^## (.+?)$|^```(\w*)([^\n]*)\n(.*?)^```$", page.read_text()):
        heading, language, marks, text = match.groups()
        if heading is not None:
            section = heading
            continue
        words = marks.split()
        told = dict(word.split("=", 1) for word in words if "=" in word)
        plain = frozenset(word for word in words if "=" not in word)
        if not plain <= MARKS or not told.keys() <= {"host", "after", "needs"}:
            raise ValueError(f"{page.name}, {section}: unknown marks {marks!r}")
        host = int(told["host"]) if "host" in told else None
        found.append(Block(section, language, text, plain, host, told.get("after"), told.get("needs")))
    return found


def anchor(heading: str) -> str:
    """Return the fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
