"""A trial of chat templates in a process of its own, which ends when they take too much: `check_templates`.

A template is a program. Compiling one, which computes its constants, or rendering a greeting can take memory
and time without end, and Jinja's sandbox bounds neither.

Owns: this process and its limits. Does not know: where templates come from; what else they refuse, which is
told when they are used.
"""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Sequence

from mooncake.errors import ModelError

_MAX_CPU_S = 10
_MAX_BYTES = 1 << 30
_DEADLINE_S = 300.0
"""for a process that takes no processor time, far beyond what a busy machine needs"""
_EXCEEDED = 3
_GREETING = [{"role": "user", "content": "Hello"}]


def check_templates(templates: Sequence[str]) -> None:
    """Render a greeting with each template. Raises ModelError if that takes too much."""
    if not templates:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mooncake.cli.template_trial"],
            input=json.dumps(templates),
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        is_bounded = False
    else:
        is_bounded = done.returncode == 0
    if not is_bounded:
        raise ModelError(
            f"its chat template takes more than {_MAX_CPU_S} s of computing, or {_MAX_BYTES >> 30} GiB of"
            " memory, for one greeting"
        )


def main() -> int:
    """In the process: 0 if all templates keep within the limits, whatever else they do."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    # As transformers', but for what no template needs to take much.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": str}
    for template in json.load(sys.stdin):
        try:
            with contextlib.suppress(TemplateError, *_REFUSALS):
                environment.from_string(template).render(messages=_GREETING, add_generation_prompt=True)
        except MemoryError:
            return _EXCEEDED
    return 0


def _raise(message: str) -> None:
    raise ValueError(message)


_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

if __name__ == "__main__":
    sys.exit(main())
