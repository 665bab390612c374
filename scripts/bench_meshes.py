from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.bench_meshes")
