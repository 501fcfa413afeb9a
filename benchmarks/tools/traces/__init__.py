"""Loads: traces of real services, mixes, and synthetic loads that resemble a trace.

`request` is the vocabulary, `reading` parses files, `replay` changes how a trace is played, `arrivals`,
`mixes` and `synthetic` make loads without a file, `fitting` computes figures of a trace. Nothing here knows
the loaded system: load generator and simulator use the same modules.
"""
