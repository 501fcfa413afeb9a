"""Experiments about the KVCache pool: hit rate by capacity and policy, a global pool against local ones, when
the pipeline of layers hides transfers, the trace's lengths and hits, the best numbers of prefill and decode
nodes, and formulas of cost, bandwidth and memory."""
