"""Starts a process of a job: reads the environment, meets the other ranks, creates the default process group."""
