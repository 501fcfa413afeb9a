"""What the papers published, beside what this system does in the simulator."""
