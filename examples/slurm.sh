#!/bin/bash
# Trains with gradwire on the nodes of a Slurm job, by one torchrun a node.
#
#     sbatch --nodes 4 --gpus-per-node 4 examples/slurm.sh
#
#SBATCH --job-name=gradwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node have different ones

# The network between the nodes, for Gloo and for gradwire, where a node has several:
#     export GLOO_SOCKET_IFNAME=eth1 GRADWIRE_INTERFACE=eth1
# What the firewall between the nodes lets pass, where there is one:
#     export GRADWIRE_PORT=29600-29700
# torch's shared store keeps what an earlier life of the job left there:
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

launch=(
    torchrun
    --nnodes "$SLURM_JOB_NUM_NODES"
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}"
    --max-restarts 3
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$head:$port"
)

# What is wrong between the nodes is said before the training, and does not keep it from starting.
srun "${launch[@]}" -m gradwire.cli doctor || true

# A job that Slurm requeues has the same id, hence goes on from its checkpoints.
srun --kill-on-bad-exit=1 "${launch[@]}" \
    "${SLURM_SUBMIT_DIR:-.}/examples/train_torchrun.py" "${SCRATCH:-$HOME}/gradwire-$SLURM_JOB_ID"
