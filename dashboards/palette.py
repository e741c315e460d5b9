"""One colour per meaning, and the page's style sheet.

Mid-tones that read on light and dark backgrounds. Charts, chips and token strips take their colours from here only.
"""

from __future__ import annotations

BLUE, TEAL, GREEN, AMBER, RED = "#3d85c6", "#2a9d8f", "#4c9f50", "#d9902f", "#d1495b"
VIOLET, PINK, BROWN, GREY, LIGHT = "#8167b8", "#c0629f", "#9c7a54", "#8a94a3", "#b9c0ca"

STATUS = {
    "running": GREEN,
    "finished": BLUE,
    "interrupted": AMBER,
    "failed": RED,
    "lost": RED,
}
SIGNAL = {"all_pass": GREEN, "mixed": BLUE, "all_fail": RED}
SIGNAL_LABEL = {"all_pass": "all pass", "mixed": "mixed", "all_fail": "all fail"}
FINISH = {"stop": GREEN, "length": AMBER, "abort": RED, "error": RED}

PHASE = {
    "setup": GREY,
    "data": BROWN,
    "sample": BLUE,
    "reward": "#c6ab45",
    "old_log_probs": TEAL,
    "ref_log_probs": "#6bbdb3",
    "values": "#87a96b",
    "advantages": PINK,
    "train": VIOLET,
    "sync": "#5f6caf",
    "checkpoint": "#b08968",
    "record": "#a3a9b5",
    "validation": GREEN,
    "unattributed": "#d5dae1",
}
# Spans inside workers take the colour of the phase they serve.
SPAN = {
    "rl.loop": LIGHT,
    "rl.rollout": "#7fb0dd",
    "rl.prefill": "#5b9bd5",
    "rl.decode": "#8dbbe6",
    "rl.micro_batch": "#a08cc9",
    "rl.optimizer": "#6a4fa3",
    "rl.weight_sync": "#8791c9",
    "rl.load_model": "#a3a9b5",
    "rl.worker.call": LIGHT,
}

# Two-sided scale of the token strip: below zero, above zero.
COLD, WARM = (61, 133, 198), (209, 73, 91)


def span_colour(name: str, phase: str | None) -> str:
    """Colour of a span: its phase's when it has one, else by its name."""
    key = phase or name.removeprefix("rl.")
    return PHASE.get(key) or SPAN.get(name) or (PHASE["sample"] if name.startswith("chat") else GREY)


CSS = """
<style>
.block-container, [data-testid="stMainBlockContainer"] {padding: 4.1rem 1.6rem 2rem; max-width: 1800px;}
[data-testid="stHeader"] {height: 3rem;}
[data-testid="stVerticalBlock"] {gap: .6rem;}
[data-stale="true"] {opacity: 1 !important; transition: none !important;}
[data-testid="stMetric"] {padding: .45rem .7rem;}
[data-testid="stMetricLabel"] p {font-size: .78rem; opacity: .75;}
[data-testid="stMetricValue"] {font-size: 1.35rem; line-height: 1.5rem;}
[data-testid="stMetricDelta"] {font-size: .76rem;}
h4 {font-size: .95rem !important; font-weight: 600 !important; padding: .5rem 0 .45rem !important;}
.rl-bar {display: flex; flex-wrap: wrap; align-items: center; gap: .3rem 1.1rem; font-size: .86rem; min-height: 2.4rem;}
.rl-bar b {font-weight: 600;}
.rl-dim {opacity: .62;}
.rl-dot {display: inline-block; width: .62em; height: .62em; border-radius: 50%; margin-right: .4em;}
.rl-live {animation: rl-pulse 1.8s ease-in-out infinite;}
@keyframes rl-pulse {50% {opacity: .35;}}
.rl-track {display: inline-block; width: 7.5rem; height: .42rem; border-radius: .3rem;
  background: rgba(138,148,163,.28); overflow: hidden; vertical-align: middle; margin: 0 .5rem;}
.rl-fill {display: block; height: 100%;}
.rl-chip {display: inline-block; padding: 0 .45rem; border-radius: .7rem; font-size: .78rem; line-height: 1.3rem;
  border: 1px solid currentColor;}
.rl-note {border-left: 3px solid; padding: .18rem .7rem; font-size: .86rem; margin: .12rem 0;
  background: rgba(138,148,163,.10);}
.rl-empty {padding: 3rem 1rem; max-width: 44rem; margin: 0 auto; text-align: center;}
.rl-empty h3 {font-weight: 600; font-size: 1.15rem;}
.rl-empty code, .rl-facts code {font-size: .84rem; padding: .1rem .35rem; border-radius: .25rem;
  background: rgba(138,148,163,.16);}
.rl-facts {display: flex; flex-wrap: wrap; gap: .25rem 1.4rem; font-size: .84rem;}
.rl-text {white-space: pre-wrap; overflow-wrap: anywhere; font-family: "Source Code Pro", monospace; font-size: .82rem;
  line-height: 1.3rem; max-height: 22rem; overflow-y: auto; padding: .6rem .8rem; border-radius: .35rem;
  background: rgba(138,148,163,.10);}
.rl-card {white-space: pre-wrap; overflow-wrap: anywhere; font-family: "Source Code Pro", monospace; font-size: .76rem;
  line-height: 1.15rem; height: 5.8rem; overflow-y: auto; margin-top: .3rem;}
.rl-tokens {font-family: "Source Code Pro", monospace; font-size: .84rem; line-height: 1.75rem; padding: .6rem .8rem;
  border-radius: .35rem; border: 1px solid rgba(138,148,163,.25); overflow-wrap: anywhere; white-space: pre-wrap;}
.rl-tokens span {position: relative; padding: .16rem 0; border-radius: .15rem; cursor: default;}
.rl-tokens span:hover {outline: 1px solid currentColor;}
.rl-tokens span:hover::after {content: attr(data-tip); position: absolute; left: 0; top: 1.6rem; z-index: 50;
  white-space: pre; font-size: .74rem; line-height: 1.05rem; padding: .4rem .6rem; border-radius: .3rem;
  background: #14171c; color: #e6e9ee; box-shadow: 0 2px 10px rgba(0,0,0,.35); pointer-events: none;}
.rl-tokens span.rl-out {text-decoration: line-through; opacity: .6;}
.rl-tokens span.rl-cut {border-bottom: 2px solid #d9902f;}
.rl-schema {max-height: 46rem; overflow-y: auto; font-size: .82rem;}
.rl-schema details {border-bottom: 1px solid rgba(138,148,163,.22); padding: .22rem .1rem;}
.rl-schema summary {cursor: pointer;}
.rl-schema p {margin: .3rem 0; opacity: .75; font-size: .78rem; line-height: 1.1rem;}
.rl-schema table {width: 100%; border-collapse: collapse; font-size: .78rem;}
.rl-schema td {padding: .06rem .3rem; vertical-align: top;}
.rl-schema td:last-child {opacity: .6; font-family: "Source Code Pro", monospace; font-size: .72rem;
  overflow-wrap: anywhere;}
.st-key-sql textarea {font-family: "Source Code Pro", monospace; font-size: .84rem; line-height: 1.3rem;}
.rl-legend {display: flex; gap: .5rem; align-items: center; font-size: .78rem; opacity: .85;}
.rl-ramp {width: 9rem; height: .55rem; border-radius: .2rem; border: 1px solid rgba(138,148,163,.3);}
</style>
"""
