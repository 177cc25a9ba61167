"""The training loop and what surrounds it: measurements, sinks, evaluation, interruption."""
