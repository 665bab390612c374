"""``python -m collectives program.py arguments``: run a program of mpi4py on Chorus, as ``chorus run`` does."""

from collectives.cli.run import main

if __name__ == "__main__":
    main()
