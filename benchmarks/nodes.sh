#!/bin/bash
# Train on two nodes, network namespaces that are joined by TCP, and compare with one: needs root.
#
#     bash benchmarks/nodes.sh
set -e
folder=$(mktemp -d)
end() {
    ip netns del node0
    ip netns del node1
    rm -r "$folder"
}
trap end EXIT
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
ip netns add node0
ip netns add node1
ip link add eth0 netns node0 type veth peer name eth0 netns node1
for node in 0 1; do
    ip -n node$node addr add 10.99.0.$((node + 1))/24 dev eth0
    ip -n node$node link set eth0 up
    ip -n node$node link set lo up
done
for node in 0 1; do
    GLOO_SOCKET_IFNAME=eth0 ip netns exec node$node torchrun \
        --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 10.99.0.1:29500 \
        --local_addr 10.99.0.$((node + 1)) --rdzv_conf is_host=$((1 - node)) \
        benchmarks/elastic.py --worker "$folder/nodes" --processes 1 --context 2 &
done
wait
torchrun --standalone --nproc_per_node 2 \
    benchmarks/elastic.py --worker "$folder/one" --processes 2 --context 2
for run in nodes one; do
    tail -n 1 "$folder/$run/run/metrics.csv"
done
cmp "$folder/nodes/run/metrics.csv" "$folder/one/run/metrics.csv"
