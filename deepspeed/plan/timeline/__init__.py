"""The simulated step on its streams: what runs when, what waits for what, and what that costs.

``operation_cost`` says what an operation of the step is, ``step_trace`` records operations, exchanges and waits in the
order in which the engine issues them, ``replay`` gives them times, ``pictures`` draws them.
"""
