"""A worker with a child that ignores polite signals; neither ends by itself. Leaves both process ids beside its job."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dagster_pipes import open_dagster_pipes

from coepg_dagster.processes import end_with_parent

IGNORES = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print(flush=True); time.sleep(600)"

if __name__ == "__main__":
    end_with_parent()
    with open_dagster_pipes() as pipes:
        child = subprocess.Popen([sys.executable, "-c", IGNORES], stdout=subprocess.PIPE)
        child.stdout.readline()
        pipes.log.info("1/10; loss=1")
        Path(sys.argv[1]).with_name("pids.json").write_text(json.dumps([os.getpid(), child.pid]))
        time.sleep(600)
