"""Parts that benchmarks share, and the programs of their ranks.

Read those of ``zero.py`` in this order: workloads, contestants, worker, arena, goals, report.
"""
