# First process in the namespaces of scripts/cluster:
# _cluster.sh MPI MPIEXEC PYTHON RATE HOST=RATE HOST=FACTOR MTU "NETEM OPTIONS" "RANKS RANKS ..." program...
# (its standard error is descriptor 3, since 2 would show a message of unshare when it is killed)
#
# A bridge is the switch. A host is a network namespace that holds one end of a veth pair, whose other end is a port of
# the bridge; it has its own host name and shared memory, System V's and POSIX's, so that no MPI takes two hosts for one.
# Both ends of a pair send at the given rate. A host has an equal part of the cores, at least one: its ranks stay
# together, as on a host that is a machine. mpiexec runs beside the bridge, on none of the hosts.
set -Eeuo pipefail

mpi="$1" mpiexec="$2" python="$3" rate="$4" slow_link="$5" slow_host="$6" mtu="$7"
read -ra netem <<<"$8"
read -ra ranks <<<"$9"
shift 9
exec 2>&3 3>&-
network=10.77.0 head=254 room=/run/chorus

failed() { printf 'scripts/cluster: the cluster could not be set up%s.\n' "${1-, see above}" >&2; exit 1; }
trap failed ERR

# A /run of its own, for the launch agent and what daemons write. The MPI's own programs are seen there too: no MPI
# quotes the paths that it gives to an agent, so they may hold no spaces.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$room/mpi" "$room/hosts" "$room/daemons"
mount --bind "$(dirname "$mpiexec")/.." "$room/mpi"

{
    printf '127.0.0.1 localhost\n%s.%d head\n' "$network" "$head"
    for ((host = 1; host <= ${#ranks[@]}; host++)); do printf '%s.%d node%d\n' "$network" "$host" "$host"; done
} >"$room/names"
mount --bind "$room/names" /etc/hosts

# shape RATE INTERFACE [command to enter a host]: limit rate, latency and loss of outgoing packets, and their size.
shape() {
    "${@:3}" ip link set "$2" mtu "$mtu"
    "${@:3}" tc qdisc add dev "$2" root handle 1: tbf rate "$1" burst 256kb latency 100ms
    [ ${#netem[@]} -eq 0 ] || "${@:3}" tc qdisc add dev "$2" parent 1: netem "${netem[@]}" limit 100000 ||
        failed ": --delay needs a time, like 100us, --loss a share, and both netem (sch_netem), not in every kernel"
}

# up ADDRESS [command to enter a host]: configure its network, IPv4 only.
up() {
    "${@:2}" sh -c '[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6'
    "${@:2}" ip link set lo up
    "${@:2}" ip address add "$1/24" dev eth0
    "${@:2}" ip link set eth0 up
}

# on HOST command...: run it there as ssh would, which takes options before the host and joins the command's words.
cat >"$room/on" <<'AGENT'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
read -r process cores <"/run/chorus/hosts/$1"
shift
exec taskset --cpu-list "$cores" nsenter --target "$process" --net --mount --uts --ipc sh -c "$*"
AGENT
chmod +x "$room/on"

# cores_of NUMBER: cores of a host, as for taskset; neighbouring hosts have different ones.
mapfile -t cores < <("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
cores_of() {
    local each=$((${#cores[@]} / ${#ranks[@]}))
    [ "$each" -gt 0 ] || { echo "${cores[$1 % ${#cores[@]}]}"; return; }
    (IFS=,; echo "${cores[*]:$1 * each:each}")
}

# slow_down PROCESS FACTOR: stop the processes of a host for all but 1/FACTOR of the time, in periods of 20 ms. PROCESS
# keeps the host's namespaces.
slow_down() {
    "$python" - "$@" <<'SLOWER' &
import os, signal, sys, time
host, share = os.readlink(f"/proc/{sys.argv[1]}/ns/uts"), 1 / float(sys.argv[2])

def members():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/uts") == host:
                yield int(name)
        except OSError:  # it has ended
            continue

def send(number, processes):
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue

while True:
    stopped = list(members())
    send(signal.SIGSTOP, stopped)
    time.sleep(0.02 * (1 - share))
    send(signal.SIGCONT, stopped)
    time.sleep(0.02 * share)
SLOWER
}

hostname head
ip link add eth0 type bridge
up "$network.$head"
for ((host = 1; host <= ${#ranks[@]}; host++)); do
    # A sleeping process keeps the host's namespaces; the host exists once it has printed its process number.
    exec {there}< <(exec unshare --net --mount --uts --ipc bash -c 'echo $$; exec sleep infinity')
    read -r process <&"$there"
    echo "$process" "$(cores_of $((host - 1)))" >"$room/hosts/node$host"
    inside=(nsenter --target "$process" --net --mount --uts --ipc)
    "${inside[@]}" hostname "node$host"
    "${inside[@]}" mount -t sysfs sysfs /sys
    "${inside[@]}" mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    ip link add "node$host" type veth peer name eth0 netns "$process"
    own="$rate"
    [ "${slow_link%%=*}" != "$host" ] || own="${slow_link#*=}"
    shape "$own" "node$host"
    shape "$own" eth0 "${inside[@]}"
    ip link set "node$host" master eth0 up
    up "$network.$host" "${inside[@]}"
    [ "${slow_host%%=*}" != "$host" ] || slow_down "$process" "${slow_host#*=}"
    case "$mpi" in
        mpich) echo "node$host:${ranks[host - 1]}" ;;
        openmpi) echo "node$host slots=${ranks[host - 1]}" ;;
        slurm) echo "NodeName=node$host NodeAddr=$network.$host CPUs=${ranks[host - 1]} Weight=$host" ;;
    esac >>"$room/hostfile"
done
PATH="$(dirname "$python"):$PATH"
[ "$1" != python ] || set -- "$python" "${@:2}"
[ "$mpi" != slurm ] || . scripts/_slurm.sh
trap - ERR

# Waiting ranks of Open MPI yield, since no host knows that others use its cores.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle-1}"
case "$mpi" in
    mpich) start=(-launcher ssh -launcher-exec "$room/on" -iface eth0 -f "$room/hostfile") ;;
    openmpi)
        # TCP is the only transport of this network. Ranks are not bound to cores: every host would take the first
        # ones.
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include="$network.0/24"
        export PRTE_MCA_plm_ssh_agent="$room/on" PRTE_MCA_prte_if_include="$network.0/24"
        export PRTE_MCA_prte_tmpdir_base="$room/daemons"
        start=(--hostfile "$room/hostfile" --map-by slot:oversubscribe --bind-to none)
        ;;
    slurm) start=() ;;
esac
[ "$mpi" = slurm ] || start=("$room/mpi/bin/mpiexec" "${start[@]}" -n "$((${ranks[*]/%/ +} 0))")
status=0
"${start[@]}" "$@" || status=$?
exit "$status"
