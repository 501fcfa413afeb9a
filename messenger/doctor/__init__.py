"""The command `mooncake-doctor`, which checks this machine and a peer, and reports faults and remedies.

machine       what the checks may ask: files of the kernel, commands, sockets
findings      what a check says; checks that neither raise nor hang
host          Python, compiled code, memory, limits, the cluster's key
certificates  TLS between messengers
rdma, gpu     devices, access to them, addresses, MTU, memory of GPUs
network       addresses, ports, buffers
reachability  the way to another messenger
probe         a client that asks the other messenger
cli           which checks, and what a person sees
"""
