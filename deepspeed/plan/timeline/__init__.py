"""Computes the timeline of a simulated step: what runs when on which stream, which waits occur, what they cost.

``operation_cost`` describes an operation of the step, ``step_trace`` records operations, exchanges and waits in the
order in which the engine issues them, ``replay`` gives them times, ``pictures`` draws them.
"""
