"""The device pages of a stage's prompts.

Owns: who waits for pages, which prompts are preempted when pages go. Does not know: passes, pool pages.
"""

import asyncio
from collections.abc import Mapping

from workers.engine.kvcache.device_pages import DevicePages
from workers.prefill.job import PrefillJob


class PromptPages:
    """The device pages of the prompts in `jobs`, by job id."""

    def __init__(self, pages: DevicePages, jobs: Mapping[int, PrefillJob]) -> None:
        self._pages, self._jobs = pages, jobs
        self._changed = asyncio.Event()

    async def allocate(self, num_pages: int) -> list[int]:
        """Return free pages, waiting until other prompts release theirs, and until no page is closed.

        Raises OutOfPages if no other prompt has pages, and there are still too few.
        """
        pages = self._pages
        while pages.num_free < num_pages and (pages.are_closed or self._have_some):
            await self._change()
        return pages.allocate(num_pages)

    def free(self, job: PrefillJob) -> None:
        """Free the pages of a prompt. Idempotent."""
        pages, job.device_pages = job.device_pages, []
        self._pages.free(pages)
        self._changed.set()

    async def replace(self, job: PrefillJob) -> None:
        """Free the pages of a preempted prompt, and allocate others, whose content is undefined.

        Raises the error of a store that failed, and OutOfPages as `allocate` does.
        """
        await job.stored()
        num_pages = len(job.device_pages)
        self.free(job)
        job.replace_pages(await self.allocate(num_pages))

    def recheck(self) -> None:
        """Check again whether prompts that wait can have pages. To be called when pages are opened again."""
        self._changed.set()

    async def free_beyond(self, num_pages: int) -> None:
        """Wait until no prompt has a page with the number `num_pages` or higher.

        Prompts that have such a page are preempted. To be called while these pages are closed.
        """
        while jobs := [job for job in self._jobs.values() if max(job.device_pages, default=0) >= num_pages]:
            for job in jobs:
                job.preempt()
            await self._change()

    @property
    def _have_some(self) -> bool:
        return any(job.device_pages for job in self._jobs.values())

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
