"""Entry point of the dashboard: ``streamlit run dashboards/app.py -- --store PATH``. Registers the pages."""

import streamlit as st

from dashboards.palette import CSS

st.set_page_config(page_title="rlinsight", layout="wide", initial_sidebar_state="collapsed")
st.html(CSS)
st.navigation(
    [
        st.Page("app_pages/overview.py", title="Overview", url_path="overview", default=True),
        st.Page("app_pages/timeline.py", title="Timeline", url_path="timeline"),
        st.Page("app_pages/rollouts.py", title="Rollouts", url_path="rollouts"),
        st.Page("app_pages/traces.py", title="Traces", url_path="traces"),
        st.Page("app_pages/metrics.py", title="Metrics", url_path="metrics"),
        st.Page("app_pages/sql.py", title="SQL", url_path="sql"),
    ],
    position="top",
).run()
