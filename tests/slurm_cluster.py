"""A real SLURM of two nodes on loopback: munged, slurmctld and two slurmd, started by hand.

    python tests/slurm_cluster.py COMMAND ...   # in a shell where SLURM is this one

For root, where Debian's slurm-wlm and munge are installed: no cgroups, no accounting. The
GPUs are pretended: devices that every machine has. Partitions: `all` (default), and
`short`, with a limit of one minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "squeue"
PATIENCE_S = 120.0
_CONF = """\
ClusterName=gdn
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=10
{types}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 {gpu}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 {gpu}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=n1,n2 MaxTime=1 State=UP
"""
_GRES = "NodeName=n1 Name=gpu File=/dev/null\nNodeName=n2 Name=gpu File=/dev/zero\n"


def installed() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def running(gres: bool = True) -> Iterator[dict[str, str]]:
    """The variables with which SLURM's commands and gdn find it; without `gres` it knows
    of no GPUs. RuntimeError if its nodes do not come up.
    """
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as name,
        contextlib.ExitStack() as daemons,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        ports = _free_ports(3)
        types, gpu = ("GresTypes=gpu", "Gres=gpu:1") if gres else ("", "")
        host = socket.gethostname()
        text = _CONF.format(host=host, ports=ports, folder=folder, types=types, gpu=gpu)
        (folder / "slurm.conf").write_text(text)
        if gres:
            (folder / "gres.conf").write_text(_GRES)
        where = {"SLURM_CONF": str(folder / "slurm.conf")}
        munge = f"--key-file={folder}/key --socket={folder}/munge.sock"
        munge += f" --log-file={folder}/munge.log --pid-file={folder}/munge.pid"
        munge += f" --seed-file={folder}/munge.seed"
        for command in (
            f"munged --foreground --force {munge}",
            "slurmctld -D -i",
            "slurmd -D -N n1",
            "slurmd -D -N n2",
        ):
            daemons.enter_context(_daemon(command, folder, where))
        _wait(where, folder)
        yield where


@contextlib.contextmanager
def _daemon(command: str, folder: Path, where: dict[str, str]) -> Iterator[None]:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(
            command.split(), env=os.environ | where, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait(where: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        nodes = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%t"],
            env=os.environ | where,
            capture_output=True,
            text=True,
        )
        if nodes.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    logs = [file.read_text(errors="replace") for file in folder.glob("*.log")]
    raise RuntimeError(f"SLURM's nodes are not up: {nodes}\n{''.join(logs)[-4000:]}")


if __name__ == "__main__":
    with running() as variables:
        done = subprocess.run(sys.argv[1:] or ["bash"], env=os.environ | variables)
    sys.exit(done.returncode)
