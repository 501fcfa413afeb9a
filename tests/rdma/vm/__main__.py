"""A program that runs a command with real RDMA verbs on a machine without an RDMA card.

    python -m tests.rdma.vm build                            once; about half a minute
    python -m tests.rdma.vm [--timeout S] test               builds if needed; the tests of tests/rdma/guest
    python -m tests.rdma.vm [--timeout S] run COMMAND ...    the same with any other command

The command runs in a small emulated machine. It has two Soft-RoCE devices, rxe0 and rxe1, which a virtual
cable connects; Debian's Python 3.11 and pyverbs; this repository, mounted read-only; and the packages of this
virtual environment. The command runs as root, and MOONCAKE_RDMA_VM=1 tells it where it is. Only its output
comes back.

Exit status: the command's; 124 if it took too long, 125 if the machine did not work, 3 if it cannot be built.
"""

import argparse
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.rdma.vm.image import CannotBuildError, build, check_machine, say
from tests.rdma.vm.machine import MachineError, run_command

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600.0
# To import is slow in an emulated machine: not torch, as the conftest.py of all tests does, and two plugins.
GUEST_TESTS = [
    *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python3", "-m", "pytest", "-p", "no:cacheprovider"),
    *("-p", "pytest_timeout", "-p", "pytest_asyncio.plugin"),
    *("--confcutdir=tests/rdma/guest", "-q", "tests/rdma/guest"),
]


def run(
    command: list[str], *, timeout_s: float = TIMEOUT_S, on_output: Callable[[bytes], None] | None = None
) -> int:
    """Run `command` in the machine, which is built if needed, and return the exit status.

    Raises CannotBuildError, MachineError, TimeoutError.
    """
    check_machine()
    packages = Path(sysconfig.get_paths()["platlib"])
    image = build()
    say(f"running {' '.join(command)}")
    return run_command(
        image,
        command,
        folders=[ROOT] if packages.is_relative_to(ROOT) else [ROOT, packages],
        environment={
            "MOONCAKE_RDMA_VM": "1",
            "PYTHONPATH": f"{ROOT}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        },
        timeout_s=timeout_s,
        on_output=on_output or _print,
    )


def _print(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma.vm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S")
    parser.add_argument("what", choices=["build", "test", "run"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.what == "run" and not arguments.command:
        parser.error("run what?")
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(128 + signal.SIGTERM))
    try:
        if arguments.what == "build":
            check_machine()
            say(f"ready in {build()}")
            return 0
        command = GUEST_TESTS if arguments.what == "test" else arguments.command
        return run(command, timeout_s=arguments.timeout)
    except CannotBuildError as error:
        say(f"cannot build the machine: {error}")
        return 3
    except TimeoutError as error:
        say(f"{error} ({arguments.timeout:g} s)")
        return 124
    except MachineError as error:
        say(str(error))
        return 125


if __name__ == "__main__":
    sys.exit(main())
