"""What ``benchmarks/gpu.py`` runs: six parts, each in a process of its own; all of them run without a GPU too."""
