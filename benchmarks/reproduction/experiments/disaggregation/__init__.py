"""Experiments about prefill and decode on separate or shared instances, and the numbers of instances."""
