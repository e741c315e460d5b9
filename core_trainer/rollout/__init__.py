"""Sampling rollouts: the engine protocol, the engines behind it, and rollouts of one or more turns on top."""
