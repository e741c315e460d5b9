"""vLLM in the policy worker (engine.py), or as servers of the run (servers.py, serve.py) that it asks (client.py)."""
