"""Instances whose engine is vLLM: its server beside our messenger, and the worker that speaks for it."""
