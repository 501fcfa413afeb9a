"""The future work of decode instances: when decodes begin, how long they last, and sums of work by time."""
