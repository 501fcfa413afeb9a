"""Experiments about the KVCache pool, about transfers of layers, and about the numbers of nodes.

Their subjects: the hit rate by capacity and policy; a global pool against local pools; the lengths and hits
of the trace; when the pipeline of layers hides transfers; the best numbers of prefill and decode nodes;
formulas of cost, bandwidth and memory.
"""
