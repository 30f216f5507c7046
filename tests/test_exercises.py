"""Answers to exercises of the docs that need no run, and what their runs are given."""

import importlib
import math
import shlex
from collections import defaultdict

import exercises
import pytest
import torch

import tiny_gpt_rlhf as gpt
from conftest import ROOT, read

PAGE = read(ROOT / "docs" / "tiny_gpt_rlhf.md")
COMMANDS = [c for rows in exercises.FAILURES.values() for f in rows for c in (f.command, f.cured)]


@pytest.mark.parametrize(
    "x, k2, k3", [(7, 7, 0.9991), (-7, -7, -1095.6), (0, 0, 0), (-math.log(8), -math.log(8), -7)]
)
def test_exercise_k2_and_k3(x, k2, k3):
    """Derivatives in log pi at log(pi / pi_ref) = x; where they balance A / beta = 7 and -7."""
    for penalty, slope in ((gpt.kl_k2, k2), (gpt.kl_k3, k3)):
        logp = torch.tensor(-9.0, dtype=torch.float64, requires_grad=True)
        penalty(logp, logp.detach() - x).backward()
        assert logp.grad.item() == pytest.approx(slope, rel=5e-5)


@pytest.mark.parametrize("beta", [0.1, 0.6])
def test_exercise_dpo_at_the_start(beta):
    """Whatever the pairs, with pi = pi_ref: ln 2, and a derivative of -beta / 2 in the gap."""
    gap = torch.tensor([-3.0, 0.5, 20.0], dtype=torch.float64, requires_grad=True)
    loss = gpt.dpo_loss(gap, gap.detach(), beta)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(2)] * 3)
    assert gap.grad.tolist() == pytest.approx([-beta / 2] * 3)


def test_the_gallery_of_the_gpt_is_run_as_printed():
    assert f'SMALL="python tiny_gpt_rlhf.py {exercises.SMALL}"' in PAGE
    for command in exercises.MADE.values():
        flags = command.split(".py ")[1].replace("--reviews 2000 ", "")
        assert f"$SMALL --seed 400 {flags}" in PAGE
    pages = [f.command for rows in exercises.FAILURES.values() for f in rows]
    assert len(set(pages)) == len(pages)


@pytest.mark.parametrize("page", ["frozen_lake", "cartpole_grpo", "tiny_gpt_rlhf"])
def test_what_the_answers_edit_is_still_there(page, monkeypatch):
    """Without the runs: edited() fails where the line to replace is gone."""
    monkeypatch.setattr(exercises, "gallery", lambda page: [])
    monkeypatch.setattr(exercises, "run", lambda *_: defaultdict(lambda: 1.0))
    rows = exercises.PARTS[page]()
    assert any("edited" in row["line"] for row in rows)


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_gallery_commands_parse(command):
    """Flags that exist, values in range; checkpoints that some name are made by the benchmark."""
    script, *flags = shlex.split(command.removeprefix("python "))
    assert importlib.import_module(script.removesuffix(".py")).build_parser().parse_args(flags)
