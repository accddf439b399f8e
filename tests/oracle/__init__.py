"""A trainer that is tiny, slow and obviously right, and the models and optimizers it is asked about.

Everything here is plain torch in one process. Nothing imports the package under test.
"""
