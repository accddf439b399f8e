"""A fake ``srun``: starts the tasks of a step with Slurm's variables on this machine.

The tests write its settings to ``FAKE_SLURM``, a JSON file: ``nodes`` (tasks per node), and ``signal``, a file whose
appearance makes it send SIGUSR1 to all tasks.
"""

import json
import os
import signal
import subprocess
import sys
import time


def hostnames(count):
    return ",".join(f"node{number}" for number in range(count))


def main():
    settings = json.loads(open(os.environ["FAKE_SLURM"]).read())
    words = sys.argv[1:]
    while words[0].startswith("-"):
        words.pop(0)
    nodes = settings["nodes"]
    size = sum(nodes)
    tasks = []
    for node, count in enumerate(nodes):
        for local in range(count):
            rank = len(tasks)
            place = {
                "SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_NTASKS": size,
                "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_ID": 0, "SLURM_NNODES": len(nodes),
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, nodes)), "SLURM_JOB_NODELIST": settings["nodelist"],
            }  # fmt: skip
            variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
            tasks.append(subprocess.Popen(words, env=variables))
    stopped = False
    while any(task.poll() is None for task in tasks):
        time.sleep(0.02)
        if not stopped and settings["signal"] and os.path.exists(settings["signal"]):
            stopped = True
            for task in tasks:
                task.send_signal(signal.SIGUSR1)
        if any(task.poll() not in (None, 0, 75) for task in tasks):  # -K
            for task in tasks:
                task.terminate()
    codes = [task.returncode for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


if __name__ == "__main__":
    main()
