"""Do what OpenPBS's pbsdsh does: -- COMMAND. ENTER is the command that enters a node.

As in its sources (src/cmds/pbsdsh.c, and start_process in src/resmom/start_exec.c): one process per line of the node
file, with qsub's environment and not the script's, in the home directory; and 0, whatever becomes of them.
"""

import os
import subprocess
import sys
from pathlib import Path

assert sys.argv[1] == "--"
kept = {name: os.environ[name] for name in ("PBS_JOBID", "PBS_O_WORKDIR", "HOME", "USER")}
tasks = []
for number, node in enumerate(Path(os.environ["PBS_NODEFILE"]).read_text().split()):
    own = {"PBS_NODENUM": str(number), "PBS_TASKNUM": f"{number + 2:08X}", "PATH": "/usr/bin:/bin"}
    tasks.append(subprocess.Popen([os.environ["ENTER"], node, *sys.argv[2:]], env=kept | own, cwd=kept["HOME"]))
for task in tasks:
    task.wait()
