"""A real cluster under more load than it can take.

`slowed` is its server, with the workers of `slowed_worker`. `sampling` reads its loads.
"""
