"""`mooncake-plan`: the cluster with the most goodput for a workload, found by simulating possible clusters.

`workload` is a load at any rate, `goodput` the highest rate that a cluster serves within its SLOs.
`placements` has the clusters that a number of devices can form, `search` chooses which of them are simulated.
`questions` has the answers that need no simulation, `advice` the conclusion. docs/planner.md has the method.
"""
