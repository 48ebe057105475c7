"""An operator that is added, and what finds it and its faults."""
