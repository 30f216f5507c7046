"""The pictures of docs/images.

Run:  python benchmarks/figures.py              all of them
"""

from __future__ import annotations

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


FIGURES = {"pairwise_weights": pairwise_weights}


def main(folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(folder / f"{name}.png")


if __name__ == "__main__":
    main()
