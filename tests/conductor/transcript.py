"""Transcripts of a Conductor: commands in, what it decided and whom it told what out, all as text.

A file is a list of entries: commands, one a line, `----`, the lines that came of them, an empty line. What
follows `#` says what is checked. Times are in seconds. Prompts of one `prompt` share their blocks, with
`prompt=NAME:N` the first N; without it a request shares none.

    cluster prefill=2 decode=1 [both=N] [inlining=yes] [ttft_slo=S] [tbt_slo=S] [scheduling=...]
            [overload=...] [threshold=X] [prefill_costs=A,B,C] [decode_costs=A,B,C] [pages=N] [block=N]
            [max_running=N] [max_waiting=N] [classes=NAME:TTFT:TBT,...] [replicate=USES] [max_migrations=N]
            [peer_timeout=S]
    at T                       it is T now
    join INSTANCE [pages=N] [can_decode=no] [can_migrate=no]    again INSTANCE    gone INSTANCE    tick
    drain INSTANCE [wanted=no] [force=yes] [stay=yes]    somebody asks for it, or for the opposite
    role INSTANCE prefill|decode|both [force=yes]    somebody asks for another role
    retire INSTANCE                            it wants to end itself
    keep CONTEXT N [prompt=P]                  a client keeps the first N blocks
    holds INSTANCE N [prompt=P] [dram=N]       its pool has the first N blocks, so many of them in DRAM
    used INSTANCE pages=N [prefill=S]          its heartbeat: pool pages in use, seconds of prefill so far
    memory INSTANCE free=N      traffic INSTANCE from=INSTANCE bytes=N [rate=N]
    decoded INSTANCE iterations=N tokens=N seconds=T    totals of its decoding so far
    load INSTANCE requests=N tbt=T             what it predicts for so many requests: all that it has
    submit R tokens=N [prompt=P] [max_tokens=N] [priority=N] [slo=CLASS] [tenant=T] [answer=A] [choices=N]
                               a choice of the answer A; the first one tells how many choices it has
    cancel R
    reserved R [held=N]    prefilled R [cached=N]    finished R tokens=N [at=INSTANCE]
    refused R [batch=N]    failed R            continue R output=N
    migrate R [to=INSTANCE]                    somebody asks for it
    precopied R output=N    prepared R tokens=N    unprepared R    handedover R output=N
                               source and destination say; with `unprepared` there is no room
    lacks R output=N [attempt=N]               its front has later tokens, not the next ones
    restart                    another Conductor takes the place of this one; nobody has registered yet
    resume R output=N [waited=S]    its front tells of it
    back INSTANCE [prompt=R,R] [reserved=R,R] [inlined=R,R] [decoding=R,R]    it goes on with these
    returning INSTANCE [failed_in=R,R]         its next life; in whose pass the one before failed (?: unknown)
    loads                      what each decode instance is believed to have
    migrations                 how many ended so far, by reason and outcome
    displaced                  how many requests gave way so far
    learned                    what the Conductor has learned about prefills
"""

from pathlib import Path
from typing import Any

import msgspec

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings, ReplicationSettings, SLOs
from conductor.view.decision_stats import DecisionStats
from conductor.view.instances import Instance
from mooncake.bus.zeromq import peer_identity
from mooncake.config.policies import Overload, Scheduling
from mooncake.messages.block_orders import DropCopies, Pin, Replicate, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Accepted,
    Cancel,
    ClusterState,
    Continue,
    Ended,
    Failed,
    FrontHello,
    Interrupted,
    KeepContext,
    Rejected,
    Resume,
    Submit,
)
from mooncake.messages.heartbeats import DecodeLoad, DecodeStats, Heartbeat
from mooncake.messages.kv_events import KVStored
from mooncake.messages.migration import HandedOver, HandOver, PreCopied, PreCopy, Prepare, Prepared, TakeOver
from mooncake.messages.operators import ChangeRole, Drain, InstanceStatus, Migrate, Migrates, Ordered
from mooncake.messages.pools import (
    Capacity,
    Grant,
    GrantedPage,
    MessengerAddress,
    PeerStats,
    PoolShard,
    PoolStats,
    Tier,
)
from mooncake.messages.requests import FinishReason, Held, HeldStep, Ref, Request, SamplingParams
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    DecodeRefused,
    Finished,
    HeartbeatAck,
    Prefill,
    Prefilled,
    Register,
    Registered,
    Reserve,
    Reserved,
    Retire,
    Retired,
    Returning,
    ReturnNoted,
    Role,
    SwitchRole,
    WorkFailed,
)

FRONT = b"front#1"
PAGES = 1000
_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
"""The role that belongs to the first letter of an instance's name."""
SEPARATOR = "----"


class Transcript:
    """One Conductor, from the command `cluster` on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._block_size = 4
        self._incarnation = 0
        self._pages = PAGES
        self._max_batch = 256
        self._submitted: dict[str, Request] = {}
        self._refs: dict[str, Ref] = {}
        """The attempts that requests had under earlier Conductors, by request id."""

    @property
    def stats(self) -> DecisionStats:
        """The counts of all decisions."""
        return self.conductor.stats

    def instance(self, name: str) -> Instance:
        """Return a registered instance."""
        instance = self.conductor.instances.get(name)
        assert instance is not None
        return instance

    def run(self, line: str) -> list[str]:
        """Carry out one command, and return the lines that it results in."""
        name, *words = line.split()
        positional = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        lines: list[str] = getattr(self, f"_do_{name}")(*positional, **options)
        return lines

    # -- the cluster --------------------------------------------------------------------------------

    def _do_cluster(
        self,
        prefill: str = "1",
        decode: str = "1",
        both: str = "0",
        inlining: str = "no",
        ttft_slo: str | None = None,
        tbt_slo: str | None = None,
        scheduling: str = "kvcache_centric",
        overload: str = "prediction",
        threshold: str = "1.25",
        prefill_costs: str | None = None,
        decode_costs: str = "0.01,0.001,0",
        pages: str = str(PAGES),
        max_batch: str = "256",
        block: str = "4",
        max_running: str = "256",
        max_waiting: str = "0",
        classes: str = "",
        replicate: str = "",
        max_migrations: str = "8",
        peer_timeout: str = "1e6",
    ) -> list[str]:
        limits = Limits(
            max_running_requests=int(max_running),
            ttft_slo_s=None if ttft_slo is None else float(ttft_slo),
            tbt_slo_s=None if tbt_slo is None else float(tbt_slo),
            peer_timeout_s=float(peer_timeout),
            max_waiting=int(max_waiting),
            max_migrations=int(max_migrations),
            slo_classes={
                name: SLOs(float(ttft), float(tbt))
                for name, ttft, tbt in (words.split(":") for words in classes.split(",") if words)
            },
        )
        replication = ReplicationSettings(uses_per_copy=float(replicate)) if replicate else None
        settings = PolicySettings(
            Scheduling(scheduling),
            float(threshold),
            Overload(overload),
            replication=replication,
            has_inlining=inlining == "yes",
        )
        profiled = None if prefill_costs is None else (_costs(prefill_costs), _costs(decode_costs))
        self._new_conductor = lambda epoch: Conductor(epoch, "model", limits, settings, profiled)
        self._epoch = 7
        self.conductor = self._new_conductor(self._epoch)
        self._block_size, self._pages, self.now_s = int(block), int(pages), 0.0
        self._max_batch = int(max_batch)
        self._instances: dict[str, Register] = {}
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
        for role, count in (("p", prefill), ("d", decode), ("b", both)):
            for index in range(int(count)):
                self._do_join(f"{role}{index}")
        return []

    def _do_join(
        self,
        name: str,
        pages: str | None = None,
        max_batch: str | None = None,
        can_decode: str = "yes",
        can_migrate: str = "yes",
    ) -> list[str]:
        layout = KVLayout(1, 1, 8, self._block_size, "float32")
        self._incarnation += 1
        num_pages = self._pages if pages is None else int(pages)
        address = MessengerAddress(name, self._incarnation, "host", "/path", ())
        self._instances[name] = register = Register(
            PROTOCOL_VERSION,
            name,
            self._incarnation,
            _ROLES[name[0]],
            "model",
            layout,
            (PoolShard(address, layout),),
            Capacity(num_pages, num_pages, self._max_batch if max_batch is None else int(max_batch)),
            "cpu",
            can_decode=can_decode == "yes",
            can_migrate=can_migrate == "yes",
        )
        return self._tell(name, register)

    def _do_restart(self) -> list[str]:
        hello = FrontHello(PROTOCOL_VERSION, "model", self._epoch, len(self.conductor.instances))
        self._refs |= {tracked.request_id: tracked.ref for tracked in self.conductor.requests.values()}
        self._epoch += 1
        self.conductor = self._new_conductor(self._epoch)
        return self._shown(self.conductor.handle(FRONT, hello, self.now_s))

    def _do_resume(self, request_id: str, output: str, waited: str = "0") -> list[str]:
        request = self._submitted[request_id].continued([42] * int(output), self._block_size)
        return self._shown(self.conductor.handle(FRONT, Resume(request, float(waited)), self.now_s))

    def _do_back(self, name: str, **by_step: str) -> list[str]:
        held = [
            Held(self._refs[request_id], HeldStep(step))
            for step, request_ids in by_step.items()
            for request_id in request_ids.split(",")
        ]
        register = msgspec.structs.replace(self._instances[name], epoch=self._epoch - 1, held=held)
        return self._tell(name, register)

    def _do_again(self, name: str) -> list[str]:
        return self._tell(name, self._instances[name])

    def _do_gone(self, name: str) -> list[str]:
        return self._shown(self.conductor.peer_gone(self._identity(name), self.now_s))

    def _do_returning(self, name: str, failed_in: str = "") -> list[str]:
        refs = [Ref(self._epoch, request_id, 1) for request_id in failed_in.split(",") if request_id]
        self._incarnation += 1
        message = Returning(name, self._incarnation, None if failed_in == "?" else refs)
        sender = peer_identity(f"{name}/returning", self._incarnation)
        return self._shown(self.conductor.handle(sender, message, self.now_s))

    def _do_drain(self, name: str, wanted: str = "yes", force: str = "no", stay: str = "no") -> list[str]:
        order = Drain(1, name, wanted == "yes", force == "yes", stay == "yes")
        return self._shown(self.conductor.handle(FRONT, order, self.now_s))

    def _do_role(self, name: str, role: str, force: str = "no") -> list[str]:
        order = ChangeRole(1, name, Role(role), force == "yes")
        return self._shown(self.conductor.handle(FRONT, order, self.now_s))

    def _do_retire(self, name: str) -> list[str]:
        return self._tell(name, Retire())

    def _do_holds(self, name: str, num_blocks: str, prompt: str = "a", dram: str | None = None) -> list[str]:
        keys = _keys(prompt, int(num_blocks))
        in_dram = keys if dram is None else keys[: int(dram)]
        self.conductor.prefixes.apply(name, [KVStored(Tier.DRAM, in_dram), KVStored(Tier.SSD, keys)])
        return []

    def _do_caches(self, name: str, num_blocks: str, prompt: str = "a") -> list[str]:
        """Report that the engine of an instance has blocks in its own prefix cache."""
        self.conductor.prefixes.apply(name, [KVStored(Tier.DEVICE, _keys(prompt, int(num_blocks)))])
        return []

    def _do_keep(self, context_id: str, num_blocks: str, prompt: str = "a") -> list[str]:
        message = KeepContext(context_id, _keys(prompt, int(num_blocks)), 1000.0)
        return self._shown(self.conductor.handle(FRONT, message, self.now_s))

    def _do_used(self, name: str, pages: str, prefill: str = "0") -> list[str]:
        return self._beat(name, num_used=int(pages), prefill_s=float(prefill))

    def _do_memory(self, name: str, free: str) -> list[str]:
        return self._tell(name, Heartbeat(0, 0, int(free), {}))

    def _do_load(self, name: str, requests: str, tbt: str) -> list[str]:
        load = DecodeLoad(int(requests), tbt_s=float(tbt))
        return self._tell(name, Heartbeat(0, 0, self._pages, {}, decode_load=load))

    def _do_decoded(self, name: str, iterations: str, tokens: str, seconds: str) -> list[str]:
        stats = DecodeStats(int(iterations), int(tokens), float(seconds))
        return self._tell(name, Heartbeat(0, 0, self._pages, {}, decode=stats))

    def _do_traffic(self, name: str, bytes: str, rate: str | None = None, **source: str) -> list[str]:  # noqa: A002
        per_s = None if rate is None else float(rate)
        return self._beat(name, {source["from"]: PeerStats(int(float(bytes)), per_s, 1)})

    def _beat(
        self,
        name: str,
        peers: dict[str, PeerStats] | None = None,
        num_used: int = 0,
        prefill_s: float = 0.0,
    ) -> list[str]:
        num_pages = self._instances[name].capacity.num_pool_pages
        nothing: dict[str, Any] = dict.fromkeys(PoolStats.__struct_fields__, 0)
        empty: dict[str, Any] = {
            field: {} for field in ("tiers", "num_misses", "sent_bytes", "received_bytes")
        }
        stats = PoolStats(
            **{**nothing, **empty, "num_pages": num_pages, "num_used": num_used, "peers": peers or {}}
        )
        return self._tell(name, Heartbeat(0, 0, num_pages, {name: stats}, prefill_s=prefill_s))

    def _do_at(self, now_s: str) -> list[str]:
        self.now_s = float(now_s)
        return []

    def _do_tick(self) -> list[str]:
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), self.now_s)
        return self._shown(self.conductor.tick(self.now_s))

    def _do_learned(self) -> list[str]:
        view = self.conductor.view
        return [
            f"{name}: a prefill of 100 tokens takes {view.prefill_costs.predict_s(slot, 100, 5000):.4g} s"
            for name, slot in view.prefixes.slots.items()
            if view.loads.is_prefill[slot] or view.loads.inlines[slot]
        ]

    def _do_displaced(self) -> list[str]:
        return [f"{self.stats.num_preempted} displaced"]

    # -- requests -----------------------------------------------------------------------------------

    def _do_submit(
        self,
        request_id: str,
        tokens: str,
        prompt: str = "",
        max_tokens: str = "4",
        priority: str = "0",
        slo: str = "",
        tenant: str = "",
        answer: str = "",
        choices: str = "1",
    ) -> list[str]:
        num_tokens = int(tokens)
        name, _, num_shared = prompt.partition(":")
        keys = _keys(name or request_id, num_tokens // self._block_size)
        if num_shared:
            keys[int(num_shared) :] = _keys(request_id, len(keys))[int(num_shared) :]
        request = Request(
            request_id,
            [1] * num_tokens,
            keys,
            SamplingParams(int(max_tokens)),
            "front",
            priority=int(priority),
            slo_class=slo,
            tenant=tenant,
            answer_id=answer,
        )
        self._submitted[request_id] = request
        submit = Submit(request, num_choices=int(choices))
        return self._shown(self.conductor.handle(FRONT, submit, self.now_s))

    def _do_cancel(self, request_id: str) -> list[str]:
        return self._shown(self.conductor.handle(FRONT, Cancel(request_id), self.now_s))

    def _do_reserved(self, request_id: str, held: str = "0") -> list[str]:
        tracked = self.conductor.requests[request_id]
        assert tracked.decode is not None
        lacking = range(int(held), -(-len(tracked.request.token_ids) // self._block_size))
        pages = [GrantedPage(index, index, 1) for index in lacking]
        grant = Grant(1, self._instances[tracked.decode].shards[0].messenger, pages)
        return self._tell(tracked.decode, Reserved(tracked.ref, grant))

    def _do_prefilled(self, request_id: str, cached: str = "0") -> list[str]:
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.prefill, Prefilled(tracked.ref, 42, int(cached)))

    def _do_finished(self, request_id: str, tokens: str = "4", at: str | None = None) -> list[str]:
        if at is not None:  # the Conductor need not know it
            return self._tell(at, Finished(self._refs[request_id], FinishReason.LENGTH, int(tokens)))
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.decode, Finished(tracked.ref, FinishReason.LENGTH, int(tokens)))

    def _do_refused(self, request_id: str, batch: str = "1", tbt: str = "0.2") -> list[str]:
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.decode, DecodeRefused(tracked.ref, "too slow here", int(batch), float(tbt)))

    def _do_failed(self, request_id: str) -> list[str]:
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.decode, WorkFailed(tracked.ref, "broken", retryable=True))

    def _do_continue(self, request_id: str, output: str) -> list[str]:
        request = self._submitted[request_id].continued([42] * int(output), self._block_size)
        return self._shown(self.conductor.handle(FRONT, Continue(request), self.now_s))

    # -- migrations ---------------------------------------------------------------------------------

    def _do_migrate(self, request_id: str, to: str | None = None) -> list[str]:
        lines = self._shown(self.conductor.handle(FRONT, Migrate(1, request_id, to), self.now_s))
        return [line.replace("<- it ", f"<- {request_id} ") for line in lines]

    def _do_precopied(self, request_id: str, output: str) -> list[str]:
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.decode, PreCopied(tracked.ref, [42] * int(output)))

    def _do_prepared(self, request_id: str, tokens: str) -> list[str]:
        ref, destination = self._coming(request_id)
        return self._tell(destination, Prepared(ref, int(tokens)))

    def _do_unprepared(self, request_id: str) -> list[str]:
        ref, destination = self._coming(request_id)
        return self._tell(destination, WorkFailed(ref, "no room", retryable=True))

    def _do_handedover(self, request_id: str, output: str) -> list[str]:
        tracked = self.conductor.requests[request_id]
        return self._tell(tracked.decode, HandedOver(tracked.ref, [42] * int(output)))

    def _coming(self, request_id: str) -> tuple[Ref, str]:
        migration = self.conductor.requests[request_id].migration
        assert migration is not None
        return migration.ref, migration.destination.instance.name

    def _do_lacks(self, request_id: str, output: str, attempt: str | None = None) -> list[str]:
        request = self._submitted[request_id].continued([42] * int(output), self._block_size)
        latest = self.conductor.requests[request_id].ref.attempt if attempt is None else int(attempt)
        return self._shown(self.conductor.handle(FRONT, Continue(request, latest), self.now_s))

    def _do_migrations(self) -> list[str]:
        migrations = self.stats.migrations
        lines = [
            f"{count} {reason} {outcome}" for (reason, outcome), count in sorted(migrations.num_ended.items())
        ]
        totals = f"{migrations.seconds:g} s, {migrations.num_copied_bytes} bytes"
        return [*lines, f"{totals}, {migrations.num_recomputed_tokens} tokens computed again"]

    def _do_loads(self) -> list[str]:
        view = self.conductor.view
        loads = view.loads
        return [
            f"{name}: {loads.batch_size[slot]:g} assigned, {loads.num_decoding[slot]:g} decoded,"
            f" {loads.num_kv_tokens[slot]:g} tokens, {view.transfers.ordered_bytes[slot]:g} bytes to send"
            for name, slot in view.prefixes.slots.items()
            if loads.is_decode[slot]
        ]

    # -- what is shown ------------------------------------------------------------------------------

    def _tell(self, name: str | None, message: object) -> list[str]:
        assert name is not None
        return self._shown(self.conductor.handle(self._identity(name), message, self.now_s))  # type: ignore[arg-type]

    def _identity(self, name: str) -> bytes:
        return peer_identity(name, self._instances[name].incarnation)

    def _shown(self, effects: list[Effect]) -> list[str]:
        lines = []
        for effect in effects:
            peer = effect.peer.decode().partition("#")[0]
            what = self._described(effect)
            if what is not None:
                lines.append(f"{peer} <- {what}")
        return lines

    def _described(self, effect: Effect) -> str | None:
        match effect.message:
            case Registered() | ClusterState() | HeartbeatAck() | ReturnNoted():
                return None
            case Migrates(_, source, destination, refusal):
                return f"it moves from {source} to {destination}" if not refusal else (f"it stays: {refusal}")
            case PreCopy(ref, num_tokens):
                length = f" tokens={num_tokens}" if num_tokens else ""
                return f"precopy {ref.request_id}#{ref.attempt}{length}"
            case Prepare(ref, request, shards, timeout_s, tbt_slo_s):
                slo = "" if tbt_slo_s is None else f" tbt_slo={tbt_slo_s:g}"
                name = shards[0].messenger.instance
                return (
                    f"prepare {ref.request_id}#{ref.attempt} output={request.num_output_tokens}"
                    f" blocks={len(request.block_keys)} from {name} within {timeout_s:g}{slo}"
                )
            case HandOver(ref):
                return f"handover {ref.request_id}#{ref.attempt}"
            case TakeOver(ref, request):
                return f"takeover {ref.request_id}#{ref.attempt} output={request.num_output_tokens}"
            case Ordered(_, status, refusal):
                return f"refused: {refusal}" if refusal or status is None else _described(status)
            case SwitchRole(role):
                return f"role {role.value}"
            case Interrupted(request_id):
                return f"interrupted {request_id}"
            case Retired():
                return "retired"
            case Reserve(ref, _, tbt_slo_s, may_refuse, _, alone):
                slo = "" if tbt_slo_s is None else f" tbt_slo={tbt_slo_s:g}{'' if may_refuse else '!'}"
                slo += " alone" if alone else ""
                return f"reserve {ref.request_id}#{ref.attempt}{slo}: {self._why(ref.request_id)}"
            case Prefill(ref, _, _, time_left_s, source, _, alone):
                left = "" if time_left_s is None else f" time_left={time_left_s:g}"
                fetch = "" if source is None else f" fetch {_name(source)}:{source.num_blocks}"
                return f"prefill {ref.request_id}#{ref.attempt}{left}{fetch}{' alone' if alone else ''}"
            case Decode(ref):
                return f"decode {ref.request_id}#{ref.attempt}"
            case Abort(ref):
                return f"abort {ref.request_id}#{ref.attempt}"
            case Accepted(request_id):
                return f"accepted {request_id}"
            case Rejected(request_id, _, status, message, retry_after_s):
                retry = "" if retry_after_s is None else f", retry after {retry_after_s:.3g} s"
                return f"rejected {request_id} {status}{retry}: {message}"
            case Replicate(keys, shards):
                return f"fetch {len(keys)} of {_prompt(keys)} from {shards[0].messenger.instance}"
            case Pin(keys):
                return f"pin {len(keys)} of {_prompt(keys)}"
            case Unpin(keys):
                return f"unpin {len(keys)} of {_prompt(keys)}"
            case DropCopies(keys):
                first = int(keys[0].split()[1])
                return f"drop {first} to {first + len(keys)} of {_prompt(keys)}"
            case Failed(request_id, message):
                return f"failed {request_id}: {message}"
            case Ended(request_id, num_tokens):
                return f"ended {request_id} {num_tokens}"
        raise AssertionError(effect)

    def _why(self, request_id: str) -> str:
        """The placement of a request as text."""
        placement = self.conductor.requests[request_id].placed.placement
        source = "" if placement.source is None else f" source={_instance(placement.source, placement)}"
        times = placement.prediction
        prefill = f"{times.prefill_s:.4g}"
        prefill += f" beside={times.beside_s:.4g}" if placement.is_inlined else ""
        return (
            f"{placement.prefill.name} {placement.decode.name} local={placement.num_local_blocks}{source}"
            f" queue={times.queue_s:.4g} transfer={times.transfer_s:.4g} prefill={prefill}"
            f" gap={times.gap_s:.4g}"
        )


def _described(status: InstanceStatus) -> str:
    state = status.state.value if status.next_role is None else f"switching to {status.next_role.value}"
    moved = f", {status.num_moved} moved" if status.num_moved else ""
    blocks = f", {status.num_blocks_left} blocks left" if status.num_blocks_left else ""
    stays = ", it stays" if status.stays else ""
    left = f"{status.num_requests} requests{moved}{blocks}{stays}"
    return f"{status.name} ({status.role.value}) is {state}, {left}"


def _instance(source: Instance, placement: object) -> str:
    return f"{source.name}:{placement.num_source_blocks}"  # type: ignore[attr-defined]


def _name(source: object) -> str:
    return str(source.shards[0].messenger.instance)  # type: ignore[attr-defined]


def _prompt(keys: list[bytes]) -> str:
    return keys[0].split()[0].decode()


def _costs(text: str) -> Costs:
    return Costs(*(float(part) for part in text.split(",")))


def _keys(prompt: str, num_blocks: int) -> list[bytes]:
    return [f"{prompt} {index}".encode().ljust(16) for index in range(num_blocks)]


def replay(path: Path) -> str:
    """Carry out a transcript's commands, and return the file's text with the present results."""
    transcript = Transcript()
    entries = []
    for entry in path.read_text().strip().split("\n\n"):
        told, separator, _ = entry.partition(f"\n{SEPARATOR}")
        commands = [line for line in told.splitlines() if not line.startswith("#")]
        came = [line for command in commands for line in transcript.run(command)]
        entries.append("\n".join([told, SEPARATOR, *came]) if commands or separator else told)
    return "\n\n".join(entries) + "\n"
