"""Every command under "Slurm" of the page on clusters is run as it stands there."""

import contextlib
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.slurm_jobs import HELLO, call, wait_until

pytestmark = pytest.mark.timeout(500)

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/clusters.md"
WAITS = {
    "scancel --signal": "held after step 30\n",
    "scontrol requeue": "held after step 60\n",
    "sbatch --array": "held after step 90\n",
}
"""Beginning of a command -> text that the output of job 4711 must have before it is run."""


def section():
    return re.search(r"^## Slurm\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]


def test_page(pmi, tmp_path):
    text = section()
    (script,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    assert len(commands) == len(re.findall(r"^\$ (?:s\w+|export) ", text, re.MULTILINE)) == 9
    assert "chorus train " in script
    (tmp_path / "job.sh").write_text(script.replace("chorus train ", "python held_training.py 30,60,90 "))
    (tmp_path / "program.py").write_text(HELLO)
    shutil.copy(PAGE.parents[2] / "tests/slurm/held_training.py", tmp_path)
    output, jobs = "", {}
    with contextlib.chdir(tmp_path):
        for command in commands:
            wanted = next((text for beginning, text in WAITS.items() if command.startswith(beginning)), "")
            wait_until(partial(has, jobs.get("4711"), wanted), partial(job_text, jobs.get("4711")))
            for number, job in jobs.items():
                command = command.replace(number, job)
            output += call("bash", "-c", command.replace("export SLURM_MPI_TYPE=pmi2", f"export SLURM_MPI_TYPE={pmi}"))
            if command.startswith("sbatch"):
                jobs[str(4711 + len(jobs))] = output.split()[-1]
        text = job_text(jobs["4711"])
    assert "rank 15 of 16" in output and "pmi2" in output, output
    assert "ended by SIGUSR1" in text and "ended by SIGTERM" in text and len(re.findall("resumed out", text)) == 2, text


def test_script_that_is_submitted_again(tmp_path):
    """The example's numbers of nodes and CPUs are replaced by those of the emulated hosts."""
    size = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    for steps, begun in ((2, "mlp: "), (4, f"resumed {tmp_path}/run/step-000000002: 2 steps were made")):
        output = tmp_path / str(steps)
        command = ("sbatch", "--wait", f"--output={output}", *size, PAGE.parents[1] / "examples/job.sbatch")
        call(*command, "--data", "digits", "--model", "mlp", "--steps", steps, RUN=str(tmp_path / "run"))
        text = output.read_text()
        assert begun in text and f"after {steps} steps" in text, text


def has(job, text):
    return not text or text in job_text(job)


def job_text(job):
    path = Path(f"slurm-{job}.out")
    return path.read_text() if path.exists() else ""
