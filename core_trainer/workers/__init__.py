"""Ray actors, one file a role, and the worker group that spawns them, dispatches to them and collects from them."""
