"""The Streamlit dashboard: it reads the store through ``rlinsight.store.query`` and owns no data of its own."""
