"""Random generators for CPUs that vLLM can rewind, as it rewinds generators for GPUs.

A request with a seed has a generator of its own. vLLM draws a token after each part of a prompt, discards
this token, and rewinds the generator by the offset of the draw. Generators for CPUs have no offset: vLLM 0.32
then ends with `CPU Generator does not use offset`, and all requests of the server end with it.

Owns: the generators' states at the beginning of a step. Does not know: requests. Loads torch.
"""

import weakref
from typing import Any

import torch

_PlainGenerator = torch.Generator
_in_use = weakref.WeakSet["RewindableGenerator"]()


class _AnyGenerator(type(_PlainGenerator)):  # type: ignore[misc]
    """A metaclass for `isinstance(x, torch.Generator)` after the class `torch.Generator` was replaced.

    Generators that were made before are instances of the new class, too.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PlainGenerator)


class RewindableGenerator(_PlainGenerator, metaclass=_AnyGenerator):
    """A generator that `set_offset` rewinds to the beginning of the step, whatever the offset.

    This is enough for vLLM, which draws once in a step and rewinds by one draw.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._before = self.get_state()
        _in_use.add(self)

    def manual_seed(self, seed: int) -> "RewindableGenerator":
        """Seed the generator, and keep the new state for `set_offset`."""
        super().manual_seed(seed)
        self.keep_state()
        return self

    def keep_state(self) -> None:
        """Keep the present state for `set_offset`."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Return 0, as `set_offset` ignores the offset."""
        return 0

    def set_offset(self, offset: int) -> "RewindableGenerator":
        """Restore the state that was kept last."""
        self.set_state(self._before)
        return self


def install() -> None:
    """Replace `torch.Generator` by `RewindableGenerator`, for all random generators made from now on.

    Idempotent.
    """
    torch.Generator = RewindableGenerator  # type: ignore[misc]


def begin_step() -> None:
    """Keep the states of all generators, before a step draws."""
    for generator in list(_in_use):
        generator.keep_state()
