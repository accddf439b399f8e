"""What makes ranks of one CPU host fast over gloo: shared memory, sockets and message queues.

NCCL jobs use none of it but the objects of checkpoints and the messages between pipeline stages. It does not grow: work
for speed belongs where it helps NCCL too.
"""
