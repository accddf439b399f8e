"""The simulated step on its streams: what runs when, what waits for what, and what that costs.

``operation_cost`` describes an operation of the step, ``step_trace`` records operations, exchanges and waits in the
order in which the engine issues them, ``replay`` gives them times, ``pictures`` draws them.
"""
