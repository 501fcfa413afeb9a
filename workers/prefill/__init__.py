"""Prefill: the queue of prompts, their passes layer by layer, the stages of a pipeline."""
