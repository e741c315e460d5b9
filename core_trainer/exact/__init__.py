"""Exact mode: the rollout engine's log-probs equal the trainer's bit for bit, on a CPU.

A token's numbers must not depend on what shares its batch, its padding, its chunk of prefill, or whether gradients are
taken. Two kinds of operation break that: matrix products, whose kernel and order of sums depend on the number of rows
(``linear.py``), and attention, whose sums depend on how many keys are there (``attention.py``). ``level.py`` switches a
model over, ``self_test.py`` proves it on the model at hand before a run may call itself exact.
"""
