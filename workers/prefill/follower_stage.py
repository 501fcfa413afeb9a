"""The stage of a follower: it computes the passes that the first rank of its tensor-parallel group announces.

Owns: this rank's part of a pass. Does not know: which pages are free, which tokens are drawn (the leader
knows).
"""

from collections.abc import Sequence

from workers.engine.batch import Chunk
from workers.execution.prefill_pass import CancelledOnDevice
from workers.groups.rank_messages import PrefillPass
from workers.kvcache.layerwise import PassPart
from workers.prefill.first_tokens import ends_of
from workers.prefill.job import PrefillJob
from workers.prefill.stage import Stage


class FollowerStage(Stage):
    """A stage whose device pages are chosen by the leader and come with each prompt (`Begin`)."""

    async def follow(self, announced: PrefillPass, jobs: Sequence[PrefillJob | None]) -> list[bool]:
        """Compute a pass with all ranks.

        Args:
            announced: The pass, with one chunk for each prompt in it.
            jobs: This rank's job for each chunk; None if the job was dropped here. The chunk of a dropped job
                is computed as far as the other ranks compute it, and counts as dropped in all ranks.

        Returns:
            Whether each chunk has been computed.
        """
        chunks = [Chunk(chunk.token_ids, chunk.start, chunk.pages) for chunk in announced.chunks]
        parts = [
            _dropped(chunk) if job is None else job.join_pass(len(chunk.token_ids), self.page_size)
            for chunk, job in zip(chunks, jobs, strict=True)
        ]
        are_computed = [False] * len(parts)

        def follow_recorded() -> list[bool]:
            with self.recorded(jobs):
                return self._follow_on_device(parts, announced.are_last)

        try:
            are_computed = await self._executor.run(follow_recorded)
        except CancelledOnDevice:
            pass
        finally:
            for job, is_computed in zip(jobs, are_computed, strict=True):
                if job is not None:
                    job.leave_pass(is_computed=is_computed)
                    if is_computed and not job.progress.num_left:
                        job.stored_behind.set()
        return are_computed

    def _follow_on_device(self, parts: Sequence[PassPart], are_last: Sequence[bool]) -> list[bool]:
        hidden = self._executor.prefill(parts, self._transfers)
        are_computed = [not is_dropped for is_dropped in self._executor.dropped(parts)]
        ends = ends_of(parts, are_computed, are_last)
        if ends:  # the leader draws from the logits, of which this rank computes a part
            self._executor.model.logits(hidden[list(ends.values())])
        return are_computed

    def _free_device_pages(self, job: PrefillJob) -> None:
        job.device_pages = []


def _dropped(chunk: Chunk) -> PassPart:
    """Return the part of a pass for a dropped chunk, which is computed because other ranks compute it."""
    return PassPart(chunk, [], [], lambda _: False, lambda *_: None, is_dropped=True)
