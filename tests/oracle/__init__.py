"""A small, slow reference trainer, with reference optimizers.

Everything here is plain torch in one process. Nothing imports the package under test.
"""
