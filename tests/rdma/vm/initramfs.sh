#!/bin/busybox sh
# First program of the machine. Loads what the root image needs, lays a writable layer of memory over it, and
# hands over to /run/vm/init.sh, which came with this boot.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules.order); do
    $b insmod "/modules/$module" || echo "cannot load $module"
done
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 200 ]; do $b usleep 50000; tries=$((tries + 1)); done
$b mount -t ext4 -o ro,noload /dev/vda /image || exec $b poweroff -f
$b mount -t tmpfs -o mode=755 layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/image,upperdir=/layer/upper,workdir=/layer/work root /root
$b mkdir -p /root/run/vm
$b cp /boot/* /bin/busybox /root/run/vm/
$b mount --move /dev /root/dev
exec $b switch_root /root /bin/bash /run/vm/init.sh
