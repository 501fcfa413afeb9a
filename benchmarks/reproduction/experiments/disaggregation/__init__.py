"""Experiments about prefill and decode on separate or on the same instances, and the numbers of instances."""
