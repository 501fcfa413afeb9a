"""`mooncake-plan`: which cluster gives the most goodput for a workload, by simulating those that could be
built.

`workload` is a load at any rate, `goodput` the highest rate that a cluster serves within its SLOs,
`placements` the clusters that a number of devices can be, `search` which of them are simulated, `questions`
what can be told without, `advice` what it comes to. docs/planner.md has the method.
"""
