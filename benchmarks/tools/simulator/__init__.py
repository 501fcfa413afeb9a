"""A discrete-event simulator of whole clusters: the server's Conductor, eviction and queue on a virtual
clock.

`cluster` is what is simulated, `setup` and `arguments` which cluster and load that is, `summary`, `series`,
`report` and `pictures` what a run says, `against_real` and `calibration` how right it is.
docs/simulator.md tells what is real and what is not.
"""
