"""The future work of decode instances: when decodes begin, how long they last, sums of work by time."""
