"""Table of the subcommands of `chorus`.

Imports the standard library only: it is read before MPI starts.
"""

from typing import NamedTuple


class CommandEntry(NamedTuple):
    """Subcommand of `chorus`: its module, help text, and how it is started.

    Attributes
    ----------
    module, summary : str
        Module whose `main()` returns the exit status, and its line in `chorus --help`.
    mpi : bool
        True if it runs on all ranks of `MPI.COMM_WORLD`, False if in one process.
    least, start : int
        Least number of ranks, and ranks to start if neither mpiexec nor -n gives a number (0 for none).
    guarded : bool
        True if the death of a rank must end all ranks until the program handles deaths itself (see `watchdog`).
    blas_threads : bool
        True if the program sets the number of BLAS threads itself; else a launch by -n gives every rank one.
    stops : bool
        True if the program ends in good order after SIGUSR1 (see `launched_ranks`).
    """

    module: str
    summary: str
    mpi: bool = True
    least: int = 1
    start: int = 0
    guarded: bool = False
    blas_threads: bool = False
    stops: bool = False


PROGRAMS = {
    "demo": CommandEntry("parallel.cli.demo", "train on handwritten digits, then race against the MPI's own", start=4),
    "bench collectives": CommandEntry("collectives.cli.bench", "speed of collectives, beside the MPI's own"),
    "bench compressed": CommandEntry("collectives.cli.bench_compressed", "speed and error of compressed allreduce"),
    "bench layouts": CommandEntry("parallel.cli.bench_layouts", "speed of data-parallel layouts"),
    "bench meshes": CommandEntry("parallel.cli.bench_meshes", "speed and memory of operators that are cut"),
    "bench pipeline": CommandEntry("parallel.cli.bench_pipeline", "idle time of pipelines, beside the simulator's"),
    "bench servers": CommandEntry("parallel.cli.bench_servers", "speed of a parameter server's push and pull", least=2),
    "bench dispatch": CommandEntry("parallel.cli.bench_dispatch", "time to exchange tokens between experts"),
    "bench quant": CommandEntry("quant.cli.bench", "speed of quantisation", mpi=False),
    "ps": CommandEntry("collectives.cli.ps", "what the ranks of running programs do, or wait for", mpi=False),
    "tune": CommandEntry("collectives.cli.tune", "measure the fastest algorithms and keep them for `auto`"),
    "run": CommandEntry("collectives.cli.run", "run a program of mpi4py on Chorus, and profile its collectives"),
    "drill": CommandEntry("collectives.cli.drill", "inject faults into a program: a table of reports", mpi=False),
    "train": CommandEntry("parallel.cli.train", "train a model", guarded=True, blas_threads=True, stops=True),
    "plan": CommandEntry("parallel.cli.plan", "forecast memory and partition of a training", blas_threads=True),
    "plan --graph": CommandEntry("parallel.cli.plan_graph", "placement of operators on a mesh", mpi=False),
    "plan --scaling": CommandEntry("parallel.cli.plan_scaling", "predicted scaling of a training", mpi=False),
    "plan --measure-device": CommandEntry("parallel.cli.measure_device", "measured device for a plan", mpi=False),
    "plan --measure-scaling": CommandEntry(
        "parallel.cli.measure_scaling", "measured scaling of trainings and sums, for --scaling", least=2
    ),
    "plan --cluster": CommandEntry("parallel.cli.plan_cluster", "layout of a large model on a cluster", mpi=False),
    "plan --search": CommandEntry("parallel.cli.plan_layout", "fastest layout of a training here", blas_threads=True),
    "plan --run": CommandEntry(
        "parallel.cli.plan_layout", "train with the fastest layout", guarded=True, blas_threads=True, stops=True
    ),
    "quantize": CommandEntry("parallel.cli.quantize_model", "quantise a trained model", blas_threads=True),
    "generate": CommandEntry("parallel.cli.generate", "write text with a trained model"),
    "predict": CommandEntry("parallel.cli.predict", "apply a trained model to a file of inputs"),
    "trace": CommandEntry("collectives.cli.trace", "record the steps of one collective call on every rank"),
    "simulate": CommandEntry("collectives.cli.simulate", "forecast the time of an algorithm on many ranks", mpi=False),
    "draw collective": CommandEntry("collectives.cli.draw", "schedule of a collective, as text or picture", mpi=False),
    "draw program": CommandEntry("collectives.cli.draw_program", "instructions of a bound call, rank by rank"),
    "draw pipeline": CommandEntry("parallel.cli.draw_pipeline", "timeline of a pipeline, text or picture", mpi=False),
    "draw attention": CommandEntry("parallel.cli.draw_attention", "work of ring attention, text or picture", mpi=False),
    "draw experts": CommandEntry("parallel.cli.draw_experts", "load of experts, text or picture", mpi=False),
    "draw dispatch": CommandEntry("parallel.cli.draw_dispatch", "tokens on their way to experts", mpi=False),
    "draw placements": CommandEntry("parallel.cli.draw_placements", "experts on ranks, and bytes sent", mpi=False),
    "draw mesh": CommandEntry("parallel.cli.draw_mesh", "parts of a model on the ranks of a mesh", mpi=False),
    "prove collectives": CommandEntry("collectives.cli.prove", "prove every algorithm of the catalogue", mpi=False),
    "prove pipelines": CommandEntry("parallel.cli.prove_pipeline", "prove every pipeline schedule", mpi=False),
}
"""Programs by the words after `chorus`: one, a group and a name, or one and an option that selects another program."""

EXAMPLES = """\
  chorus demo
  chorus run -n 4 --profile program.py
  chorus train -n 4 --data digits --model mlp
  chorus plan -n 4 --data pydoc --model gpt:small --layout zero3
  chorus bench collectives -n 2 --collective allreduce
  chorus plan --cluster h100:64 --model llama-3-70b --batch 4M-tokens
  chorus draw pipeline --schedule zb-h1 --stages 4 --microbatches 8
  chorus prove collectives --max-size 16"""


RANKS = "  -n RANKS    start RANKS ranks with the mpiexec of this environment (MPIEXEC names another)\n"


def members(first: str) -> dict[str, CommandEntry]:
    """Programs whose first word is `first`."""
    return {name: program for name, program in PROGRAMS.items() if name.partition(" ")[0] == first}


def rows(programs: dict[str, CommandEntry]) -> str:
    width = max(map(len, programs)) + 2
    return "\n".join(f"  {name:<{width}}{program.summary}" for name, program in programs.items())


def usage() -> str:
    return (
        f"usage: chorus COMMAND [-n RANKS] [options]\n\ncommands:\n{rows(PROGRAMS)}\n\n"
        f"options:\n{RANKS}"
        "  --help      this text; after a command, its options\n"
        "  --version   version of Chorus\n\n"
        f"examples:\n{EXAMPLES}\n"
    )


def group_usage(first: str) -> str:
    """Help of the programs that share their first word."""
    examples = [line for line in EXAMPLES.splitlines() if line.split()[1] == first]
    ranks, usage = (RANKS, " [-n RANKS]") if any(program.mpi for program in members(first).values()) else ("", "")
    return (
        f"usage: chorus {first} ...{usage} [options]\n\ncommands:\n{rows(members(first))}\n\n"
        f"options:\n{ranks}"
        "  --help      after a command, its options\n"
        + (f"\nexamples:\n{chr(10).join(examples)}\n" if examples else "")
    )
