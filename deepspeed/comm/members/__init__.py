"""Membership of a run whose ranks may change: links between its processes, and regrouping after a loss."""
