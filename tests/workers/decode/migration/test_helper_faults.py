"""Helpers that stand still and go on, and slow ones."""

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from kernels.cpu.moved_attention import AttentionHelper
from kernels.cpu.passes import HostedPass
from mooncake.messages.migration import LayerRange
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from tests.workers.decode_lab import StartDecodeLab
from tests.workers.gate import Brake
from tests.workers.mini_cluster import tokens_of
from tests.workers.modules_lab import NUM_PAGES, WITH_A_THIRD, Part, paired, prepared, until, wide_model
from workers.decode.migration import helper_pace
from workers.errors import SessionLostError
from workers.modules import helper_link
from workers.modules.helper_link import HelperAccess, HelperLink
from workers.modules.remote_pages import PagesServer

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


class Stopped:
    """A helper that stands still in the middle of a pass, as after SIGSTOP, until it goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._goes_on = threading.Event()
        self.began, self.ended = threading.Event(), threading.Event()
        monkeypatch.setattr(AttentionHelper, "host", lambda helper, described: self._stop(helper, described))

    def go_on(self) -> None:
        self._goes_on.set()

    def _stop(self, helper: AttentionHelper, described: HostedPass) -> None:
        self.began.set()
        assert self._goes_on.wait(DEADLINE_S)
        layer = described.layers.start
        pages, offsets = described.slots(helper._kv_layers[0].shape[3])
        helper._kv_layers[layer][torch.from_numpy(pages), :, :, torch.from_numpy(offsets)] = 1e9
        self.ended.set()


async def test_a_helper_that_was_stopped_writes_to_no_page_that_is_another_requests_meanwhile(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path, WITH_A_THIRD) as pair:
        kv, third = pair.owner.executor.kv, pair.lab.decodes[2]
        expected = await tokens_of(pair.begin("stays", 100, third, 40).answer)
        pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 0.05)
        await pair.move(1)
        keeps_waiting = kv.pages.allocate(NUM_PAGES + 1)  # so that modules do not come back yet
        kv.pages.free(keeps_waiting[:-1])
        helper = Stopped(monkeypatch)
        stopped = pair.begin("stopped", 100, pair.owner, 40)
        await until(lambda: pair.owner.decode.modules.is_moving)
        written = set(kv.pages.used())
        pair.lab.abort(stopped)
        await until(lambda: kv.pages.used() == keeps_waiting[-1:])
        other = pair.begin("other", 100, third, 40)
        await until(lambda: len(other.answer.tokens) > 8)
        with Brake(third.executor).on():
            move = await prepared(pair, other)
            assert written & set(kv.pages.used()) == set(keeps_waiting[-1:])
            helper.go_on()
            assert await asyncio.to_thread(helper.ended.wait, DEADLINE_S)
            kv.pages.free(keeps_waiting[-1:])
        assert await move.finish()
        assert await tokens_of(other.answer) == expected
        await until(lambda: kv.pages.num_free == kv.pages.num_usable == NUM_PAGES)


async def test_a_helper_that_stands_still_when_it_is_asked_costs_one_refusal(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        await pair.lose_helper()
        with monkeypatch.context() as patches, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            await asyncio.to_thread(Path(pair.path).unlink)
            silent.bind(pair.path)
            silent.listen()
            patches.setattr(helper_link, "_ANSWER_TIMEOUT_S", 0.01)
            place = await pair.place(1)
            assert place.error == f"the helper does not answer at {pair.path}: TimeoutError"
            assert not place.are_elsewhere
        await pair.restart_helper()
        await pair.move(1)
        await pair.move(0)


async def test_the_end_of_a_helper_that_stands_still_is_not_waited_for(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_link, "_END_TIMEOUT_S", 100 * DEADLINE_S)
    async with paired(start_decode_lab, tmp_path) as pair:
        pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 0.05)
        await pair.move(1)
        helper = Stopped(monkeypatch)
        decoded = pair.begin("stopped", 20, pair.owner)
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        assert len(await tokens_of(decoded.answer)) == 20
        helper.go_on()
        await until(lambda: not pair.host.num_hosted)


async def test_an_owner_ends_although_its_helper_stands_still(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 100 * DEADLINE_S)
        await pair.move(1)
        helper = Stopped(monkeypatch)
        pair.begin("ends", 100, pair.owner)
        assert await asyncio.to_thread(helper.began.wait, DEADLINE_S)
        pair.lose_owner()
        await until(lambda: pair.owner.decoding is not None and pair.owner.decoding.done())
        helper.go_on()
        await pair.owner_has_gone()
        await until(lambda: not pair.host.num_hosted)


@pytest.mark.parametrize("part", [1, LayerRange(1, 3)], ids=["heads", "layers"])
async def test_a_session_ends_if_the_pages_of_a_helper_on_another_host_cannot_be_reached(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    """The helper stands still while no iteration asks it for anything; a request that comes is loaded."""
    goes_on = threading.Event()
    monkeypatch.setattr(PagesServer, "_answer", lambda *_: goes_on.wait(DEADLINE_S))

    async def load() -> None:
        async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:
            pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 0.05)
            await pair.move(part)
            pair.begin("loaded", 20, pair.owner, inline=False)
            try:
                await until(lambda: False)
            finally:
                goes_on.set()

    with pytest.raises(ExceptionGroup) as ended:
        await load()
    assert ended.group_contains(SessionLostError, match="d1 is lost, and with it the KVCache of ")


async def test_the_end_of_a_session_in_which_a_prompt_was_to_be_computed_is_no_fault_of_its_request(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper, on another host, stands still in the first pass of an inlined prompt."""
    helper = Stopped(monkeypatch)

    async def decode() -> None:
        async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:
            pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 0.05)
            await pair.move(1)
            pair.begin("inlined", 20, pair.owner, 5)
            try:
                await until(lambda: False)
            finally:
                helper.go_on()

    with pytest.raises(ExceptionGroup) as ended:
        await decode()
    assert ended.group_contains(SessionLostError, match="d1 is lost, and with it the KVCache of ")
    assert not ended.group_contains(AssertionError)


async def test_an_order_that_loses_its_helpers_pages_ends_when_the_helper_is_free_again(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper, on another host, ends the stream for pages, and needs a while to end the hosting."""
    goes_on, hosted_at_the_end = threading.Event(), list[dict[str, int]]()
    end = HelperLink.end

    def answer(server: PagesServer, *_: object) -> None:
        server.close()
        assert goes_on.wait(DEADLINE_S)

    async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:

        async def end_late(link: HelperLink) -> None:
            asyncio.get_running_loop().call_soon(goes_on.set)
            await end(link)
            hosted_at_the_end.append(pair.host.num_hosted)

        used = pair.owner.executor.kv.pages.allocate(1)  # so that there is something to copy
        with monkeypatch.context() as patches:
            patches.setattr(PagesServer, "_answer", answer)
            patches.setattr(HelperLink, "end", end_late)
            place = await pair.place(1)
            assert place.error.startswith("the helper's pages cannot be reached: ")
            assert hosted_at_the_end == [{}]
        await pair.move(1)
        await pair.move(0)
        pair.owner.executor.kv.pages.free(used)


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Helpers of heads take so much longer for each pass."""
    host = AttentionHelper.host

    def slowly(helper: AttentionHelper, described: HostedPass) -> None:
        time.sleep(seconds)
        host(helper, described)

    monkeypatch.setattr(AttentionHelper, "host", slowly)


async def test_a_slow_helper_has_nothing_after_a_while(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_pace, "WINDOW_S", 0.0)
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await tokens_of(pair.begin("stays", 250, pair.owner).answer)
        await pair.move(1)
        slow_down(monkeypatch, 0.02)
        decoded = pair.begin("moved", 250, pair.owner)
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        assert not decoded.answer.ended.is_set()
        assert await tokens_of(decoded.answer) == expected
        assert pair.owner.decode.modules.error.startswith(
            "d1 was slow, and 1 of the KV heads are here again: "
        )
        stats = pair.owner.decode.moves
        assert stats.num_moves == {"moved": 1, "slow": 1}
        assert sum(stats.num_pauses) == 2
        assert stats.copied_bytes > 0


async def test_a_helper_is_not_compared_with_the_one_before(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await tokens_of(pair.begin("stays", 250, pair.owner).answer)
        monkeypatch.setattr(helper_pace, "WINDOW_S", 100 * DEADLINE_S)
        slow_down(monkeypatch, 0.01)
        await pair.move(1)
        for number in range(3):
            assert await tokens_of(pair.begin(f"before-{number}", 250, pair.owner).answer) == expected
        await pair.move(0)
        monkeypatch.setattr(helper_pace, "WINDOW_S", 0.0)
        await pair.move(1)
        decoded = pair.begin("moved", 250, pair.owner)
        assert await tokens_of(decoded.answer) == expected
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        assert pair.owner.decode.moves.num_moves == {"moved": 2, "back": 1, "slow": 1}
