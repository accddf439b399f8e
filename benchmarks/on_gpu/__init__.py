"""The six parts of ``benchmarks/gpu.py`` and the programs of their processes."""
