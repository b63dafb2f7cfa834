#!/bin/sh
# Runs a command on two hosts at once, alpha and beta, which are network namespaces of this machine
# joined by a virtual cable. They end with the command on alpha, and nothing is left behind.
#
#     examples/two_hosts.sh torchrun --nnodes 2 … --rdzv-endpoint alpha:29400 examples/train_ddp.py
#
# Needs ip (iproute2), and root only where the kernel lets no user make namespaces.
set -eu
case ${1:?a command is missing} in
  --alpha)
    shift
    hosts=$(mktemp)
    printf '127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n' >"$hosts"
    mount --bind "$hosts" /etc/hosts
    rm "$hosts"
    unshare --net --uts "$0" --beta "$@" &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
    exec 3<"/proc/$!/ns/net"  # keeps the cable while alpha's command runs, whatever becomes of beta
    ip link add eth0 type veth peer name eth0 netns $!
    host=alpha address=10.77.0.1/24 ;;
  --beta)
    shift
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.1; done
    host=beta address=10.77.0.2/24 ;;
  *)
    user=
    [ "$(id -u)" = 0 ] || user=--map-root-user  # root of namespaces of its own
    inside="--target $$ ${user:+--user --preserve-credentials }--net"
    echo "two_hosts.sh: from outside, a command looks at alpha by: nsenter $inside COMMAND" >&2
    exec unshare $user --net --uts --mount --pid --fork --kill-child --mount-proc \
        "$0" --alpha "$@" ;;
esac
hostname $host
ip link set lo up
ip addr add $address dev eth0
ip link set eth0 up
export TORCH_CPP_LOG_LEVEL=ERROR  # else torch warns that no name server knows these hosts
"$@"
[ $host = beta ] || wait $!
