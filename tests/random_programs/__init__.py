"""Random training programs, each compared with one process of plain torch."""
