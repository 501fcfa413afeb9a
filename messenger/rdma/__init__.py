"""One-sided transfers over RDMA network cards, by libibverbs through pyverbs.

    devices   which cards and ports there are        verbs    finds pyverbs, or says why not
    adapter   an opened card                         errors   what failed, and what helps
    memory    what the card may touch                work     slices as work requests
    endpoint  a queue pair to one peer               windows  what a peer may touch, for how long
    cards     the devices in use                     exposures, remote   the two sides of a lane
    networks  which ports share a network            topology  which card is near to which memory

Nothing here imports pyverbs before a device is asked for, so this package can be imported on every machine.
"""
