"""Pure functions over tensors, one file a family. They see log-probs, masks and advantages, never text or token ids."""
