"""How fast is a server next to MPI's plain Send and Recv of the same bytes?"""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.bench_servers")
