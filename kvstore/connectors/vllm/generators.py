"""Random generators for CPUs that vLLM can set back, as its generators for GPUs.

A request with a seed has a generator of its own. vLLM also draws a token behind each part of a prompt, throws
it away, and sets the generator back by the offset of that draw. Generators for CPUs have no offset: vLLM 0.32
then ends with `CPU Generator does not use offset`, and so do all requests of the server.

Owns: the generators' states at the beginning of a step. Does not know: requests. Loads torch.
"""

import weakref
from typing import Any

import torch

_PlainGenerator = torch.Generator
_in_use = weakref.WeakSet["RewindableGenerator"]()


class _AnyGenerator(type(_PlainGenerator)):  # type: ignore[misc]
    """A metaclass by which `isinstance(x, torch.Generator)` is also true of generators made before the class
    was replaced."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PlainGenerator)


class RewindableGenerator(_PlainGenerator, metaclass=_AnyGenerator):
    """A generator that is set back to the beginning of the step, whatever the offset.

    vLLM draws once in a step, and sets the generator back by one draw.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._before = self.get_state()
        _in_use.add(self)

    def manual_seed(self, seed: int) -> "RewindableGenerator":
        """Begin anew with `seed`."""
        super().manual_seed(seed)
        self.keep_state()
        return self

    def keep_state(self) -> None:
        """Keep the present state for `set_offset`."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Return any number, as `set_offset` needs none."""
        return 0

    def set_offset(self, offset: int) -> "RewindableGenerator":
        """Return to the state that was kept."""
        self.set_state(self._before)
        return self


def install() -> None:
    """Make all generators that this process creates from now on rewindable. Idempotent."""
    torch.Generator = RewindableGenerator  # type: ignore[misc]


def begin_step() -> None:
    """Keep the states of all generators, before a step draws."""
    for generator in list(_in_use):
        generator.keep_state()
