"""The Conductor's benchmarks: one markdown table per section, with the figures and their limits (*bars*).

    python -m benchmarks.conductor [--only SECTION] [--full]

Owns: the choice of sections. Does not know: how anything is measured.
"""

import argparse
from collections.abc import Callable

from benchmarks.conductor import decision, index

SECTIONS: dict[str, Callable[[bool], None]] = {"index": index.report, "decision": decision.report}
"""The sections by name. Each function prints a section, and gets True if all sizes are wanted."""


def main() -> None:
    """Print the sections that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conductor")
    parser.add_argument("--only", choices=list(SECTIONS), help="one section instead of all")
    parser.add_argument("--full", action="store_true", help="up to 10M blocks: 1 GB of memory")
    arguments = parser.parse_args()
    for name, report in SECTIONS.items():
        if arguments.only in (None, name):
            report(arguments.full)


if __name__ == "__main__":
    main()
