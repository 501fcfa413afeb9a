"""docs/reproduction.md, from what the experiments have found.

Owns: the page. Does not know: how anything was found.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import Experiment, Outcome

PICTURES = "reproduction"
"""folder of the pictures, beside the page"""

_HEAD = """\
# Published results, reproduced

`make reproduce TRACE=conversation_trace.jsonl.gz` runs these experiments and writes this page. The trace is
`FAST25-release/traces/conversation_trace.jsonl` of the
[Mooncake repository](https://github.com/kvcache-ai/Mooncake): one hour, 12,031 requests.

All clusters are simulated ([simulator.md](simulator.md)): the server's own Conductor, queue and eviction run
on a virtual clock, and devices take as long as a roofline says, with one set of efficiencies for all
experiments. So what can be compared is which policy or architecture wins, and roughly by how much; seconds
are those of the model, not of the papers' machines. Nothing was tuned for a figure. A node is 8 x A800 with
800 Gbit/s and 1 TB of pool, the model llama3-70b, unless said otherwise. Each section ends with the name of
its experiment and the date on which it ran, with the code of that day.
"""


class Found(msgspec.Struct, frozen=True):
    """By one run of one experiment."""

    outcome: Outcome
    date: str
    machine: str


def write_page(found: Sequence[tuple[Experiment, Found | None]], results: Path, page: Path) -> None:
    """What has not been run is only named."""
    parts = [_HEAD]
    if lacking := [f"`{experiment.name}`" for experiment, of_experiment in found if of_experiment is None]:
        parts.append(f"Not run yet: {', '.join(lacking)}.\n")
    for experiment, of_experiment in found:
        if of_experiment is None:
            continue
        parts.append(_section(experiment, of_experiment))
        for picture in of_experiment.outcome.pictures:
            folder = page.parent / PICTURES
            folder.mkdir(exist_ok=True)
            shutil.copyfile(results / picture, folder / picture)
    page.write_text("\n".join(parts))


def _section(experiment: Experiment, found: Found) -> str:
    lines = [f"## {experiment.title}", "", f"Published: {experiment.published}", "", experiment.setting, ""]
    for table in found.outcome.tables:
        lines += [table.markdown(), ""]
    lines += [f"![{experiment.title}]({PICTURES}/{picture})\n" for picture in found.outcome.pictures]
    lines += [experiment.remark(found.outcome), ""]
    lines.append(f"(`{experiment.name}`, {found.date}, {found.machine})\n")
    return "\n".join(lines)
