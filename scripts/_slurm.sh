# Slurm on the hosts of scripts/cluster, a part of _cluster.sh: a slurmd on each host, slurmctld and munged beside them.
# All files are in $room, seen in the cluster's namespaces only. Sets SLURM_CONF for the program.
#
# Ranks are not bound to cores and no control group holds them (task/none, linuxproc), as a container may have none.
# `config_overrides`: a host has as many CPUs as its line says, not those of the machine. `cred_expire`: seconds that a
# requeued job waits before it starts again. TmpFS: PMIx keeps its files there, and hosts share /tmp. Timeouts are long,
# as this machine may be busy.

install -d -m 700 -o munge -g munge "$room/munge"
head -c 1024 /dev/urandom >"$room/munge/key"
chown munge:munge "$room/munge/key"
chmod 400 "$room/munge/key"
chmod 711 "$room/munge"
setpriv --reuid munge --regid munge --clear-groups munged --foreground --key-file "$room/munge/key" \
    --socket "$room/munge/socket" --pid-file "$room/munge/pid" --seed-file "$room/munge/seed" \
    --log-file "$room/munge/log" 2>/dev/null &
mkdir -p "$room/slurm/state"
export SLURM_CONF="$room/slurm/slurm.conf"
cat - "$room/hostfile" >"$SLURM_CONF" <<CONF
ClusterName=chorus
SlurmctldHost=head($network.$head)
SlurmUser=root
AuthInfo=socket=$room/munge/socket,cred_expire=5
StateSaveLocation=$room/slurm/state
SlurmdSpoolDir=$room/slurm/%n
SlurmctldPidFile=$room/slurm/slurmctld.pid
SlurmdPidFile=$room/slurm/%n.pid
SlurmctldLogFile=$room/slurm/slurmctld.log
SlurmdLogFile=$room/slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TmpFS=/dev/shm
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1
MessageTimeout=100
TCPTimeout=30
BatchStartTimeout=120
KillWait=120
UnkillableStepTimeout=600
OverTimeLimit=5
LaunchParameters=use_interactive_step
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
CONF
echo CgroupPlugin=cgroup/v1 >"$room/slurm/cgroup.conf"  # initialised even where nothing uses it; this one needs no mount
for ((tries = 0; tries < 600; tries++)); do
    [ ! -S "$room/munge/socket" ] || break
    sleep 0.1
done
slurmctld -D 2>/dev/null &
for ((host = 1; host <= ${#ranks[@]}; host++)); do
    mkdir "$room/slurm/node$host"
    "$room/on" "node$host" exec slurmd -D -N "node$host" 2>/dev/null &
done
# ready: all hosts are idle.
limit=$((SECONDS + 120))
until [ "$(timeout 20 sinfo -h -t idle -o %D 2>/dev/null | awk '{ n += $1 } END { print n }')" = ${#ranks[@]} ] ||
    [ "$SECONDS" -gt "$limit" ]; do
    sleep 0.2
done
[ "$SECONDS" -le "$limit" ] ||
    { tail -n 20 "$room"/slurm/*.log >&2; failed ": Slurm does not start, see its messages above"; }
