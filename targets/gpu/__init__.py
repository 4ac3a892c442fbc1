"""What the targets for GPUs share: which nodes they can run, and the schedules of kernels."""
