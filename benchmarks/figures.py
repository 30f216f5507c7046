"""The pictures of docs/images.

Run:  python benchmarks/figures.py              all of them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import matplotlib  # noqa: E402

matplotlib.use("Agg")  # draws where there is no screen

import torch  # noqa: E402
from common import ROOT  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from torch import Tensor  # noqa: E402

import text_env_pairwise_grpo as te  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def pull(form: str, differences: Tensor, temperature: float) -> Tensor:
    """-dL/dw of the first of two texts at the sampling policy, for score differences (N,)."""
    scores = torch.stack([differences, torch.zeros_like(differences)], dim=1)  # (N, 2)
    w = torch.zeros_like(scores, requires_grad=True)
    if form == "group_norm":
        loss = -te.clipped_surrogate(w.exp(), te.compute_grpo(scores), 0.2, 0.2).mean(dim=1)
    else:
        loss = getattr(te, form)(w, scores, torch.full_like(scores[:, :1], temperature))
    (gradient,) = torch.autograd.grad(loss.sum(), w)
    return -gradient[:, 0]


def pairwise_weights(path: Path) -> None:
    """How strongly each form of text_env_pairwise_grpo.py pulls on the better of two texts."""
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    styles = {"pairwise_linear": "C3-", "pairwise_logistic": "C0-", "group_norm": "C2--"}
    for form, style in styles.items():
        axes.plot(x, pull(form, x, 1.0), style, label=form, linewidth=2)
    axes.set(ylim=(-1.2, 1.2), xlabel="score difference dR, in units of T", ylabel="pull")
    axes.axhline(0, color="0.8", zorder=0)
    axes.axvline(0, color="0.8", zorder=0)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def bias_and_noise(path: Path) -> None:
    """Share off the true direction against noise, from the results of benchmarks/oracle.py."""
    file = ROOT / "benchmarks" / "results" / "oracle.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["default"]
    figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = ["reinforce", "rloo", "actor_critic", "actor_critic:learned", "gae", "loss_type:grpo"]
    for axes, point, more in zip(both, ("start", "half"), ([], ["ppo"]), strict=True):
        shown = [r for r in rows if r["point"] == point and r["estimator"] in names + more]
        for row in shown:
            x = row["off"]
            axes.errorbar(x, row["noise"], xerr=row["off_se"], fmt="o", color="C0", ecolor="0.8")
            axes.annotate(
                row["estimator"], (x, row["noise"]), (6, 4), textcoords="offset points", fontsize=9
            )
        axes.set(title=f"{point}, J {shown[0]['return']:.3f}", xlim=(-0.05, 0.45))
        axes.set_ylim(0, 1.15 * max(row["noise"] for row in shown))
        axes.set_xlabel("off: sine of the angle of the mean to the truth")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("noise to signal of one batch")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


FIGURES = {"pairwise_weights": pairwise_weights, "bias_and_noise": bias_and_noise}


def main(folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(folder / f"{name}.png")


if __name__ == "__main__":
    main()
