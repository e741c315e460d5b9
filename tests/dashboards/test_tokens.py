from __future__ import annotations

import math
import re

import pandas as pd

from dashboards import tokens


def frame(**columns: list) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    blank = {
        name: [None] * size
        for name in (
            "piece",
            "rollout_log_prob",
            "old_log_prob",
            "log_prob",
            "ref_log_prob",
            "entropy",
            "advantage",
            "weight",
            "value",
            "value_target",
            "ratio",
        )
    } | {"in_loss": [True] * size, "clipped": [False] * size}
    return pd.DataFrame(blank | {"pos": range(size), "token_id": range(100, 100 + size), "turn_index": 0} | columns)


def shades(html: str) -> list[str]:
    return re.findall(r'<span class="[^"]*" style="([^"]*)"', html)


def test_model_text_cannot_become_markup() -> None:
    """Tags and quotes in a token stand escaped in the strip and in the hover text."""
    evil = '</span><script>alert("1")</script>\''
    html = tokens.strip(frame(piece=[evil], rollout_log_prob=[-1.0]), "log-prob")
    assert "<script" not in html
    assert html.count("<span") == html.count("</span>") == 1
    assert re.fullmatch(
        r'<div class="rl-tokens"><span class="[^"]*" style="[^"]*" data-tip="[^"]*">[^<]*</span></div>', html
    )


def test_control_characters_and_whitespace_are_visible() -> None:
    """A newline, a tab, an escape character and an empty piece can be told apart."""
    html = tokens.strip(frame(piece=["\n", "\t", "\x1b", ""], rollout_log_prob=[-1.0] * 4), "log-prob")
    assert all(mark in html for mark in ("↵", "⇥", "\\x1b", "∅"))


def test_without_pieces_the_ids_are_shown() -> None:
    """When texts were not captured the strip shows token ids, not blanks."""
    assert "⟨101⟩" in tokens.strip(frame(rollout_log_prob=[-1.0, -2.0]), "log-prob")


def test_two_sided_channels_colour_by_sign_and_size() -> None:
    """Below and above zero differ in hue, larger is stronger, unknown is uncoloured."""
    part = frame(log_prob=[-1.0, -1.2, -1.0, None], old_log_prob=[-1.2, -1.0, -1.05, -1.0])
    up, down, small, unknown = shades(tokens.strip(part, "new - old"))
    assert up.split(",")[:3] != down.split(",")[:3]
    assert float(up.split(",")[3].strip(")")) > float(small.split(",")[3].strip(")"))
    assert unknown == ""


def test_noise_stays_pale() -> None:
    """Differences far below a channel's floor are not stretched to full colour."""
    part = frame(old_log_prob=[-1.0, -2.0], rollout_log_prob=[-1.0 - 1e-7, -2.0 + 1e-7])
    assert all(shade.endswith("0.00)") for shade in shades(tokens.strip(part, "old - rollout")))


def test_hover_has_every_known_number() -> None:
    """Log-probs, probability, ratio, entropy, advantage and masks are in the hover text; unknown ones are left out."""
    part = frame(
        piece=[" 7"], log_prob=[-0.5], old_log_prob=[-0.6], ratio=[math.exp(0.1)], entropy=[0.3], advantage=[1.5],
        weight=[0.75], value_target=[1.0], clipped=[True],
    )  # fmt: skip
    tip = re.findall(r'data-tip="([^"]*)"', tokens.strip(part, "entropy"))[0]
    assert all(word in tip for word in ("old", "new", "ratio", "entropy", "advantage", "clipped   yes", "-0.50000"))
    assert f"{math.exp(0.1):.5f}" in tip
    assert "ref" not in tip
    assert "weight    0.75000" in tip
    assert "target    +1.00000" in tip
    assert "value  " not in tip


def test_marks_follow_the_masks() -> None:
    """Tokens outside the loss are struck through, clipped ones underlined, unknown masks leave no mark."""
    part = frame(entropy=[1.0] * 3, in_loss=[False, True, None], clipped=[False, True, None])
    assert re.findall(r'<span class="([^"]*)"', tokens.strip(part, "entropy")) == ["rl-out", "rl-cut", ""]


def test_correction_and_critic_are_offered_where_they_ran() -> None:
    """A rejected token is full below zero, weight 1 is uncoloured; the critic's error is target less value."""
    part = frame(weight=[0.0, 1.0, 0.5], value=[0.25, 0.5, 0.5], value_target=[1.0, 0.5, 0.0])
    assert tokens.available(part) == ["weight - 1", "value", "target - value"]
    assert list(tokens.values(part, "target - value")) == [0.75, 0.0, -0.5]
    rejected, kept, halved = shades(tokens.strip(part, "weight - 1"))
    assert [float(shade.split(",")[3].strip(")")) for shade in (rejected, kept)] == [0.75, 0.0]
    assert rejected.split(",")[:3] == halved.split(",")[:3]


def test_channels_without_numbers_are_not_offered() -> None:
    """A run without a reference or training arrays offers only what it has."""
    assert tokens.available(frame(rollout_log_prob=[-1.0])) == ["log-prob"]
