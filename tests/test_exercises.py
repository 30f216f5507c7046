"""Answers to exercises of the docs that need no run, and what their runs are given."""

import math
import sys

import pytest
import torch

import tiny_gpt_rlhf as gpt
from conftest import ROOT

sys.path.insert(1, str(ROOT / "benchmarks"))
import exercises

PAGE = (ROOT / "docs" / "tiny_gpt_rlhf.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("x, k2, k3", [(7, 7, 0.9991), (-7, -7, -1095.6), (0, 0, 0)])
def test_exercise_k2_and_k3(x, k2, k3):
    """Derivatives in log pi at log(pi / pi_ref) = x; where they balance A / beta = 7 and -7."""
    for penalty, slope in ((gpt.kl_k2, k2), (gpt.kl_k3, k3)):
        logp = torch.tensor(-9.0, dtype=torch.float64, requires_grad=True)
        penalty(logp, logp.detach() - x).backward()
        assert logp.grad.item() == pytest.approx(slope, abs=0.05 if x < 0 else 5e-5)
    assert 1 - math.exp(2.079) == pytest.approx(-7, abs=5e-3) and -math.log(8) < -2.079


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
