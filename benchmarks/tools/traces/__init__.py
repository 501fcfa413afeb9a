"""Loads: traces of real services, mixes, and synthetic loads that resemble a trace.

`request` is the vocabulary, `reading` parses files, `replay` changes how a trace is played. `arrivals`,
`mixes`, `phases` and `synthetic` make loads without a file, and `fitting` computes figures of a trace. These
modules know no system under load, so load generator and simulator use the same ones.
"""
