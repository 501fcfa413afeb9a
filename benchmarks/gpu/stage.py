"""The process that runs one stage: `python -m benchmarks.gpu.stage MODULE FILE`.

Owns: how a stage ends. Does not know: the list of stages, their time limits.
"""

import importlib
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.report import Report


def main(module: str, file: str) -> None:
    """Run a module's `run(report)`. The report writes its rows, and at the end a status, to the file."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the stage's servers are ended too
    report = Report(Path(file))
    try:
        importlib.import_module(module).run(report)
    except Exception:  # noqa: BLE001 - the other stages go on, and the report says what it was
        report.say(status="crashed", error=traceback.format_exc())
    else:
        report.say(status="passed" if report.is_good else "failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
