"""Loads: traces of real services, mixes, and synthetic loads that resemble a trace.

`request` is the vocabulary, `reading` the files, `replay` how a trace is played, `arrivals`, `mixes` and
`synthetic` what has no file, `fitting` what a trace says about itself. Nothing here knows who is loaded: the
load generator and simulators use it alike.
"""
