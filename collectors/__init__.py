"""The collector: sole owner of a store. Receives OTLP, writes it exactly once, serves read-only SQL while it lives."""
