"""The papers' published results beside this system's in the simulator."""
