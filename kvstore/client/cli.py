"""The command `mooncake-kv`: shows and changes the contents of running pools.

Owns: the command line and its output. Does not know: how pools are asked.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.client.client import KVCachePool
from kvstore.client.clusters import check_of_one_cluster, pools_of
from kvstore.client.rows import Rows
from mooncake.cli.command_line import FAILED, Parser, exit_code
from mooncake.cli.steps import StepDisplay
from mooncake.errors import ConfigError, PoolError
from mooncake.messages.blocks import KEY_BYTES, BlockKey
from mooncake.messages.pools import PoolStats, Tier

_VERIFIED_BYTES = 64 << 20
"""The most bytes of blocks that one call verifies."""
_MIB = 1 << 20


EXAMPLES = """examples:
  mooncake-kv stats
  mooncake-kv ls --cluster 8001
  mooncake-kv verify --pool tcp://10.0.0.2:7950 --key-file cluster.key
  mooncake-kv get KEY_HEX --out block.bin --layers 0:4

Exit codes: 0, 1 if something failed or is damaged, 2 for wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    """Run the `mooncake-kv` command, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    The code is 0 for success, 1 if something failed or is damaged, 2 for wrong use, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Run the parsed command, and return its exit code unless it raises an error."""
    try:
        if options.pool and getattr(options, "all", False):
            check_of_one_cluster(options.pool)
        with _Pools(options.pool or pools_of(options.cluster), options.key_file) as pools:
            code: int = options.command(options, pools)
            sys.stdout.flush()
            return max(code, FAILED if pools.has_lost else 0)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Pools:
    """The pools of a command. Each pool is asked separately, as pools may be of different models."""

    def __init__(self, addresses: Sequence[str], key_file: str | None) -> None:
        """Connect to the pools.

        Raises PoolError if no pool answers, ConfigError for a wrong address or key.
        """
        self.has_lost = False
        """Whether a pool was left out because it did not answer."""
        self._key_file = key_file
        self._pools: list[KVCachePool] = []
        try:
            for address in addresses:
                self._connect(address, is_only=len(addresses) == 1)
        except BaseException:
            self.close()
            raise
        if not self._pools:
            raise PoolError("none of these pools can be asked")

    def _connect(self, address: str, *, is_only: bool) -> None:
        try:
            self._pools.append(KVCachePool.connect(address, key_file=self._key_file))
        except PoolError as error:
            if is_only:
                raise
            print(f"error: {error}", file=sys.stderr)
            self.has_lost = True

    def __iter__(self) -> Iterator[KVCachePool]:
        return iter(self._pools)

    def __enter__(self) -> "_Pools":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


# -- commands ---------------------------------------------------------------------------------------


def _stats(options: argparse.Namespace, pools: _Pools) -> int:
    columns = (
        "instance",
        "tier",
        "blocks",
        "of",
        "MiB",
        "hits",
        "evicted",
        "in use",
        "pins",
        "state",
        "address",
    )
    is_sound = True
    with Rows(columns, as_json=options.json, last_below=True) as rows:
        for pool in pools:
            for instance, stats in pool.stats(check_integrity=options.check).items():
                is_sound &= stats.integrity is None
                if options.json:
                    facts = {"instance": instance, "address": pool.addresses[0]}
                    rows.add((), {**facts, **msgspec.to_builtins(stats)})
                else:
                    for tier in stats.tiers:
                        rows.add([*_tier_cells(instance, tier, stats), pool.addresses[0]], {})
    return 0 if is_sound else FAILED


def _tier_cells(instance: str, tier: Tier, stats: PoolStats) -> list[object]:
    counts = stats.tiers[tier]
    state = "healthy" if counts.is_healthy else "failing"
    in_dram: list[object] = ["", "", state]
    if tier is Tier.DRAM:
        in_dram = [stats.num_used, stats.num_pins, stats.integrity or state]
    held_mib = counts.num_blocks * stats.block_bytes // _MIB
    return [
        *(instance, tier.value, counts.num_blocks, counts.num_slots, held_mib),
        *(counts.num_hits, counts.num_evictions, *in_dram),
    ]


def _ls(options: argparse.Namespace, pools: _Pools) -> int:
    with Rows(("key", "instance", "tier", "uses", "users"), as_json=options.json) as rows:
        for pool in pools:
            for instance, block in pool.list_blocks():
                facts: dict[str, object] = {
                    "key": block.key.hex(),
                    "instance": instance,
                    "tier": block.tier.value,
                    "num_uses": block.num_uses,
                    "num_users": block.num_users,
                }
                rows.add(list(facts.values()), facts)
    return 0


def _get(options: argparse.Namespace, pools: _Pools) -> int:
    for pool in pools:
        layers = _layers(options.layers, pool.layout.num_layers)
        block = bytearray(len(layers) * pool.layout.layer_bytes)
        if pool.get([options.key], [block], layers) == [True]:
            Path(options.out).write_bytes(block)
            facts: dict[str, object] = {
                "key": options.key.hex(),
                "num_bytes": len(block),
                "file": options.out,
            }
            with Rows(list(facts), as_json=options.json) as rows:
                rows.add(list(facts.values()), facts)
            return 0
    raise PoolError(f"no pool has an intact block {options.key.hex()}")


def _layers(wanted: tuple[int, int] | None, num_layers: int) -> range:
    begin, end = wanted or (0, num_layers)
    if not 0 <= begin < end <= num_layers:
        raise ConfigError(f"--layers {begin}:{end}: the blocks have the layers 0:{num_layers}")
    return range(begin, end)


def _verify(options: argparse.Namespace, pools: _Pools) -> int:
    num_damaged = 0
    with Rows(("instance", "intact", "damaged", "unread"), as_json=options.json) as rows:
        for pool in pools:
            ((instance, stats),) = pool.stats().items()
            num_intact, damaged, num_unread = _verify_pool(pool, instance, stats)
            num_damaged += len(damaged)
            keys = [key.hex() for key in damaged]
            facts: dict[str, object] = {
                "instance": instance,
                "num_intact": num_intact,
                "damaged": keys,
                "num_unread": num_unread,
            }
            rows.add((instance, num_intact, ", ".join(keys) or "none", num_unread), facts)
    return FAILED if num_damaged else 0


def _verify_pool(pool: KVCachePool, instance: str, stats: PoolStats) -> tuple[int, list[BlockKey], int]:
    """Verify all blocks of a pool.

    Returns the number of intact blocks, the keys of damaged blocks, and the number of blocks in neither
    group: a block is in neither if it was removed meanwhile, or if one of its copies cannot be read now.
    """
    num_intact, damaged = 0, []
    num_blocks, num_read = sum(tier.num_blocks for tier in stats.tiers.values()), 0
    with StepDisplay() as steps:
        seen: set[BlockKey] = set()
        blocks = iter(block.key for _, block in pool.list_blocks())
        num_at_once = max(1, _VERIFIED_BYTES // pool.layout.block_bytes)
        while some_keys := list(itertools.islice(blocks, num_at_once)):
            # A block in two tiers is listed twice, and verified once: all of its copies are read then.
            found = pool.verify([key for key in dict.fromkeys(some_keys) if key not in seen])
            num_intact += found.num_intact
            damaged += found.damaged
            seen.update(some_keys)
            num_read += len(some_keys)
            steps.show(f"reading {instance}", num_read, num_blocks)
    return num_intact, damaged, len(seen) - num_intact - len(damaged)


def _drop(options: argparse.Namespace, pools: _Pools) -> int:
    what = "every block of these pools" if options.all else _blocks(len(options.keys))
    if not options.yes:
        if sys.stdin.isatty():
            if not _confirms(f"Drop {what}?"):
                return FAILED
        elif options.all:
            raise ConfigError("drop --all asks first, and stdin is no terminal to answer on: add --yes")
    num_dropped = 0
    with Rows(("instance", "dropped"), as_json=options.json) as rows:
        for pool in pools:
            (instance,) = pool.stats()
            num_copies = pool.clear() if options.all else pool.remove(options.keys)
            num_dropped += num_copies
            rows.add((instance, num_copies), {"instance": instance, "num_dropped": num_copies})
    if not num_dropped and not options.all:
        several = len(options.keys) > 1
        raise PoolError(
            f"none of these {len(options.keys)} blocks is in a pool"
            if several
            else "this block is in no pool"
        )
    return 0


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _confirms(question: str) -> bool:
    print(question, "[y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- arguments --------------------------------------------------------------------------------------


def _key(text: str) -> BlockKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise argparse.ArgumentTypeError(f"a key has {2 * KEY_BYTES} hexadecimal digits, not {text!r}")
    return key


def _layer_range(text: str) -> tuple[int, int]:
    begin, colon, end = text.partition(":")
    if not (begin.isdecimal() and colon and end.isdecimal()):
        raise argparse.ArgumentTypeError(f"layers are given as FIRST:END, such as 0:4, not {text!r}")
    return int(begin), int(end)


def _parser() -> Parser:
    parser = Parser(
        prog="mooncake-kv",
        description="Look into running KVCache pools.",
        epilog=EXAMPLES,
    )
    parser.add_version()
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    common = Parser(add_help=False)
    which = common.add_mutually_exclusive_group()
    which.add_argument(
        "--cluster",
        metavar="PORT|DIR",
        help="a cluster that you run on this host, by the port of its API or by its run directory; default:"
        " the only one",
    )
    which.add_argument(
        "--pool",
        action="append",
        metavar="ADDRESS",
        help="unix:/path/worker-0.sock or tcp://host:port, may be repeated",
    )
    common.add_argument(
        "--key-file",
        metavar="FILE",
        help="the cluster's key (mooncake-serve keygen), which tcp:// addresses need and others ignore",
    )
    common.add_argument("--json", action="store_true", help="print one JSON object a line")

    def add(name: str, command: object, text: str) -> Parser:
        subparser = commands.add_parser(
            name, parents=[common], help=text, description=text.capitalize() + "."
        )
        subparser.set_defaults(command=command)
        return subparser

    stats = add("stats", _stats, "show what pools hold and whether every page is accounted for")
    stats.add_argument(
        "--check",
        action="store_true",
        help="have every page looked at now, which holds the pool up for a moment; default: what the pool"
        " found when it was last idle",
    )
    add("ls", _ls, "list blocks")
    get = add("get", _get, "write a block, or some layers of it, to a file")
    get.add_argument("key", type=_key, metavar="KEY_HEX")
    get.add_argument("--out", required=True, metavar="FILE")
    get.add_argument("--layers", type=_layer_range, metavar="A:B", help="layers A to B-1; default: all")
    add("verify", _verify, "read every block and compare its checksums; damaged ones are dropped")
    drop = add("drop", _drop, "forget blocks in every tier")
    what = drop.add_mutually_exclusive_group(required=True)
    what.add_argument("keys", nargs="*", type=_key, default=[], metavar="KEY_HEX")
    what.add_argument(
        "--all", action="store_true", help="all blocks of these pools, which must be of one cluster"
    )
    drop.add_argument(
        "--yes", action="store_true", help="do not ask; where stdin is no terminal nobody is asked"
    )
    return parser


if __name__ == "__main__":
    main()
