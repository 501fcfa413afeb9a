"""Instances whose engine is vLLM: its server, and the worker between server, messenger and Conductor."""
