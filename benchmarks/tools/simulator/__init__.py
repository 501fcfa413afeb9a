"""A discrete-event simulator of whole clusters, with the server's Conductor, eviction and queue.

`cluster` is the simulated cluster. `setup` and `arguments` describe cluster and load. `summary`, `series`,
`report` and `pictures` show the results of a run; `against_real` and `calibration` compare them with a real
server. docs/simulator.md says what is real and what is simulated.
"""
