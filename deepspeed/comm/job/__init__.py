"""Describes the job: lays its ranks out as a mesh with named axes, and creates their process groups."""
