"""Starts the ranks of a run on one or several machines, and ends all their processes.

Reading order: :mod:`.runner` (the ``deepspeed`` command), :mod:`.launch` (``python -m deepspeed.launcher.launch``),
:mod:`.selection`, :mod:`.resources` and :mod:`.devices` (which ranks), :mod:`.environment` and :mod:`.ports` (command
and environment of a rank), :mod:`.local_run` (one run from start to exit code), :mod:`.supervisor` and
:mod:`.processes` (start and stop), :mod:`.forked` (ranks that share their imports), :mod:`.screen` and :mod:`.failures`
(output on the screen, and the first failure). For several machines: :mod:`.remote` (the commands of pdsh, ssh, MPI and
Slurm), :mod:`.front` (running them), :mod:`.placing` (the rank by MPI and Slurm), :mod:`.link` and :mod:`.handshake`
(how launchers learn of each other).

On one machine a run is three layers of processes::

    deepspeed (the front: reads and shows every rank's output, decides)
      `-- supervisor (own session: starts, reaps and stops the ranks)
            |-- rank 0 (own session) -- its children
            `-- rank 1 (own session) -- its children

Front and supervisor watch each other through one socket, and both adopt orphans. Whichever of the two is killed, the
other one stops everything that is left. On several machines there is one such tree on each (one per rank under MPI and
Slurm), and their fronts are linked.
"""
