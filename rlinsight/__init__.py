"""rlinsight: RL post-training for language models, built observability-first.

Importing this package loads no torch, ray, duckdb or streamlit.
"""

__version__ = "0.1.0"
