"""The device's executor, which makes all calls that compute on the device, on one thread.

`prefill` and `decode` run on the device thread (`Executor.run`, `submit`) and block it.

Owns: the model, the device's paged KVCache, the thread. Does not know: messages, requests, leases.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from mooncake.errors import GrammarError
from mooncake.model.grammar import Grammars, GrammarState
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel, PassAtHelper
from workers.engine.weights import Weights
from workers.execution.device_name import device_name
from workers.execution.draws import Drawn, Draws
from workers.execution.jobs import wait_to_end
from workers.execution.pass_record import PassRecord
from workers.execution.prefill_pass import PrefillPass
from workers.kvcache.layerwise import LayerTransfers, PassPart

T = TypeVar("T")
_MOST_AHEAD = 4
"""The most layers of prefill that a GPU has queued and not computed."""


class Executor:
    """The executor of a model on its device, one call after the other."""

    def __init__(
        self,
        model: DecoderModel,
        kv: DeviceKVCache,
        grammars: Grammars | None = None,
        record: PassRecord | None = None,
        refill: Callable[[Weights], None] | None = None,
    ) -> None:
        """Start the device thread.

        Without `grammars` no request may have a grammar. `record` records the requests of each pass. `refill`
        fills weights from the model's checkpoint or raises ModelError; without it no layer may be freed.
        """
        self.model = model
        self.kv = kv
        self.record = record or PassRecord()
        self._grammars, self._refill = grammars, refill
        self._thread = ThreadPoolExecutor(1, "device", _use, (kv.device,))
        self._ahead: deque[torch.cuda.Event] = deque()
        """Events on the device's stream, each behind one of the latest layers of prefill."""
        self._cutting_in: deque[Callable[[], None]] = deque()
        """Calls that wait for the end of a layer.

        The event loop appends calls, the device thread takes them.
        """

    @property
    def engine(self) -> str:
        """The device and its kernels as text: `cuda (triton)`, `cpu (avx512_bf16)`, `cpu (torch)`."""
        return f"{self.kv.device.type} ({self.model.computed_by})"

    @property
    def has_helper_for_layers(self) -> bool:
        """Whether another instance computes some of the layers."""
        return self.kv.hosted is not None

    @property
    def device_name(self) -> str:
        """The name of the GPU or processor. Instances with the same name count as equally fast."""
        return device_name(self.kv.device)

    def load_freed_layers(self) -> None:
        """Load the weights of layers that had been freed, on the caller's thread.

        Raises ModelError if the checkpoint has changed or cannot be read.
        """
        if self.model.freed_layers:
            assert self._refill is not None
            self.model.load_freed_layers(self._refill)

    async def run(self, call: Callable[[], T], on_cancel: Callable[[], None] | None = None) -> T:
        """Make `call` on the device thread, and return its result.

        If the caller is cancelled, `on_cancel` is called, which may shorten `call`. CancelledError is raised
        once `call` has ended: only then may the pages that `call` uses be freed.
        """
        ended = asyncio.get_running_loop().run_in_executor(self._thread, call)
        return await wait_to_end(ended, on_cancel)

    async def cut_in(self, call: Callable[[], T], on_cancel: Callable[[], None] | None = None) -> T:
        """Make `call` as `run` does, but between two layers of a prefill pass if one is running."""
        ended: Future[T] = Future()

        def make() -> None:
            try:
                ended.set_result(call())
            except Exception as error:  # noqa: BLE001 - the waiter for the call gets its error
                ended.set_exception(error)

        self._cutting_in.append(make)
        self._thread.submit(self._run_cut_ins)  # in case no pass is running, or its last layer has ended
        return await wait_to_end(asyncio.wrap_future(ended), on_cancel)

    def _run_cut_ins(self) -> None:
        while self._cutting_in:
            self._cutting_in.popleft()()

    async def follow(self, grammar: str) -> GrammarState | None:
        """Return the initial state of a grammar; None if `grammar` is empty.

        Raises GrammarError if the grammar cannot be compiled, or if this instance has no tokenizer.
        """
        if not grammar:
            return None
        if self._grammars is None:
            raise GrammarError("this instance has no tokenizer, which grammars need")
        return (await self._grammars.get(grammar)).begin()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue `call` on the device thread, behind all earlier calls, and return its future."""
        return self._thread.submit(call)

    def prefill(
        self,
        parts: Sequence[PassPart],
        transfers: LayerTransfers,
        hidden: torch.Tensor | None = None,
        most_at_once: int | None = None,
    ) -> torch.Tensor:
        """Compute one pass of layer-wise prefill (`PrefillPass`); calls may cut in between two layers.

        Returns the hidden states `[T, hidden_size]` that leave this model's layers, one part after the other.
        `hidden` are the states that enter these layers, on any device; None in the first stage.
        `most_at_once` is the most tokens that a layer computes at a time. Raises `CancelledOnDevice` between
        two layers once all parts are dropped; all ranks of a tensor-parallel group stop at the same layer.
        Raises HelperLost if a helper that has layers is lost.
        """
        computing = PrefillPass(
            self.model,
            self.kv,
            parts,
            transfers,
            lambda: all(self.dropped(parts)),
            self._cutting_in,
            self._run_cut_ins,
            self._keep_pace,
        )
        return computing.compute(hidden, most_at_once)

    def _keep_pace(self) -> None:
        """Wait until a GPU has computed all but the latest `_MOST_AHEAD` layers.

        Otherwise the GPU's queue would be too long for calls to cut in between two layers.
        """
        if self.kv.device.type != "cuda":
            return
        self._ahead.append(torch.cuda.current_stream(self.kv.device).record_event())
        if len(self._ahead) > _MOST_AHEAD:
            self._ahead.popleft().synchronize()

    def dropped(self, parts: Sequence[PassPart]) -> list[bool]:
        """Return for each part of a pass whether any rank has dropped it. All ranks get the same result."""
        are_dropped = [part.is_dropped for part in parts]
        if self.model.shard is not None:
            are_dropped = self.model.shard.any(are_dropped)
        for part, is_dropped in zip(parts, are_dropped, strict=True):
            part.is_dropped |= is_dropped
        return are_dropped

    def prepare(self, chunks: Sequence[Chunk]) -> Batch:
        """Build the batch of a pass on the caller's thread, without using the device."""
        return Batch.build(chunks, self.kv)

    def send_to_helper(self, batch: Batch) -> PassAtHelper | None:
        """Compute an iteration up to the layers that a helper has, and send the pass to the helper.

        Returns None if no helper has layers.
        """
        return self.model.send_to_helper(batch, self.kv)

    def receive_from_helper(self, sent: PassAtHelper, batch: Batch, draws: Draws) -> Drawn:
        """Compute the rest of an iteration that was sent to a helper, and return its draws.

        Raises HelperLost if the helper does not answer in time.
        """
        return draws.draw(self.model.receive_from_helper(sent, batch, self.kv))

    def decode(self, batch: Batch, draws: Draws) -> Drawn:
        """Compute one iteration, and return its draws. Raises HelperLost if a helper is lost."""
        return draws.draw(self.model.forward(batch, self.kv))


def _use(device: torch.device) -> None:
    """Make a GPU the one on which the calling thread allocates tensors without a device number."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
