"""Starting the ranks of a run on this machine, and never leaving one behind.

Reading order: :mod:`.runner` (the ``deepspeed`` command), :mod:`.launch` (``python -m deepspeed.launcher.launch``),
:mod:`.resources` and :mod:`.devices` (which ranks), :mod:`.environment` and :mod:`.ports` (what each rank is told),
:mod:`.job` (one run from start to exit code), :mod:`.supervisor` and :mod:`.processes` (start and stop), :mod:`.screen`
and :mod:`.failures` (what is shown, and who failed first).

A run is three layers of processes::

    deepspeed (the front: reads every rank's output, shows it, decides)
      `-- supervisor (own session: starts, reaps and stops the ranks)
            |-- rank 0 (own session) -- its children
            `-- rank 1 (own session) -- its children

Front and supervisor watch each other through one socket, and both adopt orphans. Whichever of the two is killed, the
other one stops everything that is left.
"""
