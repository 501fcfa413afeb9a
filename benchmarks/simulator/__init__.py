"""A discrete-event simulator of whole clusters: the server's Conductor, eviction and queue on a virtual
clock.

`cluster` wires everything, `prefill`, `decode` and `coupled` are the instances, `costs`, `cards` and
`network` say what takes how long, `cache` is a pool, `requests` and `summary` what a run says.
docs/simulator.md tells what is real and what is not.
"""
