"""The parts of ``benchmarks/zero.py``: workloads, contestants, worker, arena, goals, report (read in this order)."""
