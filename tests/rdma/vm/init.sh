#!/bin/bash
# PID 1 of the machine: mounts, two RDMA devices, then the command. It prints to the console; the command's
# output and the outcome go through two virtio ports.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
boot=/run/vm

off() { sync; $boot/busybox poweroff -f; exit 1; }
report() { echo "$*" >&9; }
die() { report "error $*"; exec 9>&-; off; }

mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
ln -sf /proc/self/fd /dev/fd
hostname rdma-vm
echo "127.0.0.1 localhost rdma-vm" > /etc/hosts
modprobe -a virtio_console virtio_rng 9pnet_virtio 9p veth rdma_rxe ib_uverbs rdma_ucm

port_of() {
    local name
    for name in /sys/class/virtio-ports/*/name; do
        [ "$(cat "$name" 2>/dev/null)" = "$1" ] && basename "$(dirname "$name")" && return
    done
    return 1
}
for _ in $(seq 100); do
    output=$(port_of vm.output) && control=$(port_of vm.control) \
        && [ -c "/dev/$output" ] && [ -c "/dev/$control" ] && break
    sleep 0.05
done
exec 9> "/dev/$control"

while IFS=$'\t' read -r tag folder; do
    mkdir -p "$folder"
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro "$tag" "$folder" \
        || die "cannot mount $folder"
done < $boot/mounts

# rxe0 and rxe1 over the two ends of a veth pair. rxe knows one network namespace only, so both ends are in it,
# and rules keep what goes between them off the loopback, where rxe would not see it.
ip link set lo up
ip link add rdma0 type veth peer name rdma1
for n in 0 1; do
    # 4200 leaves room for RoCE's largest packets, of 4096 bytes
    ip link set rdma$n mtu 4200 addr 02:00:00:00:77:0$((n + 1)) up
    ip addr add 10.77.0.$((n + 1))/32 dev rdma$n
    echo 1 > /proc/sys/net/ipv4/conf/rdma$n/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/rdma$n/rp_filter
    ip rule add pref 1 iif rdma$n lookup local
done
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
for n in 0 1; do
    from=10.77.0.$((n + 1)) to=10.77.0.$((2 - n))
    ip route add $to dev rdma$n src $from table 10$n
    ip neigh replace $to lladdr 02:00:00:00:77:0$((2 - n)) dev rdma$n nud permanent
    ip rule add pref 2 from $from to $to lookup 10$n
done
ip rule add pref 3 lookup local
ip rule del pref 0
for n in 0 1; do
    rdma link add rxe$n type rxe netdev rdma$n || die "no device rxe$n"
    # the device takes the interface's address over a moment later
    for _ in $(seq 100); do
        grep -qs "0000:0000:0000:0000:0000:ffff:0a4d:000$((n + 1))" \
            /sys/class/infiniband/rxe$n/ports/1/gids/* && break
        sleep 0.02
    done
done
ulimit -l unlimited
ulimit -c 0
ulimit -n 65536
report "ready $(cut -d' ' -f1 /proc/uptime)"

# The port can be opened once only, so the command writes to a pipe.
mkfifo $boot/output
cat $boot/output > "/dev/$output" & carrier=$!
setsid bash $boot/command < /dev/null > $boot/output 2>&1 9>&- &
wait $!
status=$?
# Processes it has left behind may hold the pipe: what they print within two seconds is still carried.
(sleep 2; kill $carrier) 2>/dev/null &
wait $carrier 2>/dev/null
report "status $status"
exec 9>&-
off
