"""Stores blocks in a KVCache pool, reads them back in four ways, and tidies up.

    .venv/bin/python docs/examples/kvcache_pool.py unix:/run/user/1000/mooncake-serve-x/worker-0.sock
    .venv/bin/python docs/examples/kvcache_pool.py tcp://10.0.0.2:7000 --key-file cluster.key

`mooncake-kv stats` finds the pools of a running mooncake-serve. Several addresses may be given.
"""

import argparse

import numpy as np

from kvstore.client.client import KVCachePool
from mooncake.messages.blocks import block_keys, root_key


def main(addresses: list[str], key_file: str | None) -> None:
    with KVCachePool.connect(*addresses, key_file=key_file) as pool:
        layout = pool.layout
        print(f"pool of {pool.fingerprint}: blocks of {layout.block_bytes} bytes, {layout.num_layers} layers")

        # A key names all tokens up to the end of its block. The salt keeps this apart from real requests.
        tokens = range(3 * layout.block_size)
        keys = block_keys(tokens, layout.block_size, root_key(pool.fingerprint, cache_salt="example"))
        blocks = [np.random.default_rng(seed).bytes(layout.block_bytes) for seed in range(len(keys))]

        pool.put(keys, blocks)
        print(f"stored {pool.prefix_len(keys)} blocks, in {pool.exists(keys)[0]}")

        whole = [bytearray(layout.block_bytes) for _ in keys]
        assert pool.get(keys, whole) == [True, True, True]
        assert whole == blocks

        first_layer = [bytearray(layout.layer_bytes) for _ in keys]
        assert all(pool.get(keys, first_layer, layers=range(1)))
        assert first_layer == [block[: layout.layer_bytes] for block in blocks]

        if addresses[0].startswith("unix:"):
            with pool.lease(keys, ttl_s=10) as lease:  # read where they are, without a copy
                assert lease.blocks == blocks
                assert lease.verify() == [True, True, True]

        pool.pin(keys[:1], ttl_s=60)  # rather evict others
        if len(addresses) > 1:
            replicas = pool.change_replica(keys[0], num_replicas=2)
            print(f"copies of the first block are in {', '.join(replicas.instances)}")

        print(f"removed {pool.remove(keys)} copies")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stores, reads and removes three blocks.")
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, for tcp:// addresses")
    arguments = parser.parse_args()
    main(arguments.addresses, arguments.key_file)
