"""The prompts of an instance that another part of its session computes, outside of the decode batch.

Owns: what a move of modules asks of them. Does not know: how prompts are computed.
"""

from typing import Protocol


class Prompts(Protocol):
    """The prompts of `Prefill` orders (`workers.prefill.runner.PrefillRunner`)."""

    @property
    def num_prompts(self) -> int:
        """The number of prompts, whether they are computed or wait."""

    @property
    def most_pages(self) -> int:
        """The most device pages that any of these prompts needs."""

    def hold(self) -> None:
        """Begin no further pass until `resume`."""

    async def quiet(self) -> None:
        """Wait until no pass or store uses a device page. To be called after `hold`."""

    def resume(self) -> None:
        """Begin passes again, perhaps with pages in another arrangement."""

    async def free_beyond(self, num_pages: int) -> None:
        """Wait until no prompt has a device page with the number `num_pages` or higher, nor gets one.

        To be called while these pages are closed.
        """

    def recheck_pages(self) -> None:
        """Check again whether prompts that wait can have pages, because closed pages are open again."""
