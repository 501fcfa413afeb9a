"""The page docs/reproduction.md, made from the findings of one run.

Owns: the page. Does not know: the experiments.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import Experiment, Outcome

PICTURES = "reproduction"
"""The folder of the pictures, in the page's folder."""

_HEAD = """\
# Published results, reproduced

These commands fetch the trace, run the experiments and write this page:

```sh needs=internet
curl -LO https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl
make reproduce TRACE=conversation_trace.jsonl
```

The trace is of the [Mooncake repository](https://github.com/kvcache-ai/Mooncake): one hour, 12,031 requests.

All clusters are simulated ([simulator.md](simulator.md)): the server's own Conductor, queue and eviction run
on a virtual clock, and devices take as long as a roofline says, with one set of efficiencies for all
experiments. So what can be compared is which policy or architecture wins, and roughly by how much; seconds
are those of the model, not of the papers' machines. The margin and the quantile of predicted iterations were
chosen on the overload policies' loads, with two of the three seeds; nothing else was tuned for a figure. A
node is 8 x A800 with 800 Gbit/s and 1 TB of pool, the model llama3-70b, unless said otherwise.
"""

_NOT_REPRODUCED = """\
## What is not reproduced

- **The other workloads.** Mooncake (FAST'25) has a tool&agent and a synthetic trace, the arXiv version one
  of 23,608 requests. What was published for these (effective capacity +64 / +42 / +22% and +62 / +40 / +28%;
  global pool x1.38 and x2.36; prefill GPU time -53% and -64%) would need them; the conversation trace stands
  for all.
- **The Transfer Engine's bandwidth** (87 GB/s on 4 x 200 Gbit/s, 190 GB/s on 8 x 400 Gbit/s, 2.4 and 4.6
  times TCP). It is a property of NICs that a simulation can only be given: here 87% of the data sheet's
  figure.
- **Heights in figures without numbers** (arXiv Figures 8 to 10 and 13): compared in order and shape only.
"""


class Found(msgspec.Struct, frozen=True):
    """The findings of one experiment, and the seconds that it took."""

    outcome: Outcome
    seconds: float


class Run(msgspec.Struct, frozen=True):
    """The facts of the run that made a page."""

    trace: str
    date: str
    machine: str
    num_processes: int
    seconds: float


def write_page(
    experiments: Sequence[Experiment], found: Mapping[str, Found], run: Run, results: Path, page: Path
) -> None:
    """Write the page. Failed experiments are only named on it. Pictures are copied from `results`."""
    parts = [_HEAD, _stamp(run)]
    if failed := [f"`{experiment.name}`" for experiment in experiments if experiment.name not in found]:
        parts.append(f"**Failed in this run: {', '.join(failed)}.**\n")
    for experiment in experiments:
        if experiment.name not in found:
            continue
        parts.append(section(experiment, found[experiment.name]))
        for picture in found[experiment.name].outcome.pictures:
            folder = page.parent / PICTURES
            folder.mkdir(exist_ok=True)
            shutil.copyfile(results / picture, folder / picture)
    page.write_text("\n".join([*parts, _NOT_REPRODUCED]))


def _stamp(run: Run) -> str:
    processes = "process" if run.num_processes == 1 else "processes"
    return (
        f"Run on {run.date} with `make reproduce TRACE={run.trace}`, on {run.machine}: {run.seconds / 60:.0f}"
        f" minutes with {run.num_processes} {processes}.\n"
    )


def section(experiment: Experiment, found: Found) -> str:
    """Return the section of one experiment, in Markdown."""
    lines = [f"## {experiment.title}", "", f"Published: {experiment.published}", "", experiment.setting, ""]
    for table in found.outcome.tables:
        lines += [table.markdown(), ""]
    lines += [f"![{experiment.title}]({PICTURES}/{picture})\n" for picture in found.outcome.pictures]
    lines += [experiment.remark(found.outcome), ""]
    lines.append(f"(`{experiment.name}`, {found.seconds:.0f} s)\n")
    return "\n".join(lines)
