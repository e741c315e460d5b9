"""The native rollout engine: continuous batching inside the policy worker, on the weights that are being trained."""
