"""The timeline of a simulated step: spans on its streams, waits, and their costs.

``operation_cost`` describes an operation of the step, ``step_trace`` records operations, exchanges and waits in the
order in which the engine issues them, ``replay`` gives them times, ``pictures`` draws them.
"""
