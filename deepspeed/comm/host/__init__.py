"""Sends data between ranks of one CPU host faster than gloo: by shared memory, sockets and message queues.

NCCL jobs use it only for objects of checkpoints and for messages between pipeline stages. It is complete: further work
on speed belongs where it helps NCCL too.
"""
