"""The pictures of docs/images, from benchmarks/results/*.json and the scripts' own functions.

Run:  python benchmarks/figures.py                      all of them
      python benchmarks/figures.py clip.png horizon.png  only these
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import matplotlib  # noqa: E402

matplotlib.use("Agg")  # draws where there is no screen

import numpy as np  # noqa: E402
import torch  # noqa: E402
from common import ROOT, groups  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import cartpole_pg_family as cp  # noqa: E402
import frozen_lake_ppo_grpo as fl  # noqa: E402
import text_env_pairwise_grpo as te  # noqa: E402

IMAGES = ROOT / "docs" / "images"

# ======== style: opaque and light, so that a dark page shows it too ===============================

# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#333333"
SHADES = matplotlib.colors.ListedColormap(plt.cm.Blues(np.linspace(0, 0.85, 256)))  # 0..1
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "0.4",
    "axes.grid": True,
    "axes.labelcolor": BLACK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.dpi": 110,
    "font.size": 10,
    "grid.color": "0.92",
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "text.color": BLACK,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
}


def canvas(width: float, height: float, *shape: int | list, **kwargs) -> tuple:
    """A figure of inches in the common style, and its axes: one, rows x columns, or a mosaic."""
    plt.rcParams.update(matplotlib.rcParamsDefault | STYLE)
    make = plt.subplot_mosaic if shape and isinstance(shape[0], list) else plt.subplots
    return make(*shape, figsize=(width, height), **kwargs)


def save(figure: Figure, path: Path) -> None:
    """A PNG of 256 colours: a third of the bytes, and no difference to see."""
    figure.savefig(buffer := io.BytesIO(), facecolor="white", metadata={"Software": None})
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(256, dither=0).save(path, optimize=True)


@cache
def results(name: str) -> dict[str, list[dict]]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def median_curve(curves: list[tuple[list, list]]) -> tuple[np.ndarray, np.ndarray]:
    """Median of curves (x, y), at every x of any; one that has ended keeps its last value."""
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    return grid, np.median([np.interp(grid, x, y) for x, y in curves], axis=0)


def draw_seeds(
    axes: Axes, rows: list[dict], x: str, y: str, color: str, label: str, style: str = "-"
) -> None:
    """Every seed thin, their median thick."""
    curves = [(row[x], row[y]) for row in rows]
    for curve in curves:
        axes.plot(*curve, color=color, linewidth=0.8, alpha=0.5)
    axes.plot(*median_curve(curves), style, color=color, linewidth=2.4, label=label)


def draw_level(axes: Axes, y: float, text: str, x: float = 0.99, above: bool = True) -> None:
    """A dashed line across, named at its right end."""
    axes.axhline(y, color=BLACK, linewidth=1, linestyle="--")
    where = {"xytext": (0, 3 if above else -3), "textcoords": "offset points", "ha": "right"}
    at = {"xycoords": axes.get_yaxis_transform(), "va": "bottom" if above else "top"}
    axes.annotate(text, (x, y), fontsize=9, **where, **at)


def draw_points(axes: Axes, rows: list[dict], y: str, x: int, color: str, shift: float) -> float:
    """A dot for each row at x, a bar at their median; returns the median."""
    values = [row[y] for row in rows]
    middle, at = statistics.median(values), x + shift
    axes.plot([at] * len(values), values, "o", color=color, markersize=5, alpha=0.6, mew=0)
    axes.plot([at - 0.12, at + 0.12], [middle] * 2, color=color, linewidth=2.4)
    return middle


# ======== learning curves, from results/curves.json ===============================================

ESTIMATORS = {"ppo": (BLUE, "PPO"), "grpo": (ORANGE, "GRPO")}
FORMS = {
    "pairwise_logistic": (BLUE, "-"),
    "pairwise_linear": (ORANGE, "-"),
    "group_norm": (GREEN, "--"),  # it often lies on another
}


def lake_curves(axes: Axes, kind: str) -> None:
    rows = results("curves")["frozen_lake"]
    for (name,), some in groups(rows, "estimator").items():
        draw_seeds(axes, some, "updates", kind, *ESTIMATORS[name])
    draw_level(axes, rows[0]["optimum"], "optimum")
    draw_level(axes, rows[0]["uniform"], "uniform policy")
    axes.set(xlabel="updates of 32 maps x 8 episodes", ylim=(0, 1.09), xlim=(0, 300))


def learning_frozen_lake(path: Path) -> None:
    """Exact success on unseen maps against updates, sampled and greedy."""
    figure, (left, right) = canvas(9, 3.6, 1, 2, sharey=True)
    lake_curves(left, "sampled")
    lake_curves(right, "greedy")
    left.set(ylabel="exact success on 1,000 unseen maps", title="actions sampled from the policy")
    right.set(title="most likely action only")
    left.legend(loc="center right", title="5 seeds, median thick")
    save(figure, path)


def learning_cartpole(path: Path) -> None:
    """Sampled return against environment steps, an estimator a panel."""
    found = groups(results("curves")["cartpole"], "line")
    figure, panels = canvas(9.5, 7.6, 3, 3, sharex=True, sharey=True)
    for axes, ((name,), rows) in zip(panels.flat, found.items(), strict=True):
        color = ORANGE if name == "cartpole_grpo.py" else BLUE
        draw_level(axes, 475, "475", x=0.13)
        draw_seeds(axes, rows, "env_steps", "sampled", color, name)
        for row in rows:
            axes.plot(row["env_steps"][-1], row["sampled"][-1], "o", color=color, markersize=4)
        steps = statistics.median(row["env_steps"][-1] for row in rows) / 1000
        axes.text(0.98, 0.04, f"median {steps:.0f} k", transform=axes.transAxes, ha="right")
        phi = "sum of discounted deltas" if name == "gae" else cp.PHI.get(name, "branches")
        axes.set_title(f"{name}:  {phi}", fontsize=10)
    panels[0, 0].set(xscale="log", xlim=(1e3, 3e6), ylim=(0, 540))
    figure.supxlabel("environment steps; a dot: 475 or more, greedy as well, so the run stops")
    figure.supylabel("mean sampled return of 100 unseen episodes")
    save(figure, path)


def learning_text_env(path: Path) -> None:
    """Exact expected return against texts, a target a panel."""
    targets = groups(results("curves")["text_env"], "target")
    figure, panels = canvas(9, 3.6, 1, 2)
    for axes, ((target,), rows) in zip(panels, targets.items(), strict=True):
        for (form,), some in groups(rows, "form").items():
            color, style = FORMS[form]
            draw_seeds(axes, some, "texts", "expected_return", color, form, style)
        draw_level(axes, len(target), f"highest: {len(target)}")
        title = f"'{target}'" if len(target) < 10 else f"'{target[:12]}...', {len(target)} letters"
        axes.set(
            title=title, xlabel="texts sampled", xlim=(0, None), ylim=(None, 1.1 * len(target))
        )
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    panels[0].set_ylabel("exact expected return")
    panels[0].legend(loc="center right", title="5 seeds, median thick")
    save(figure, path)


# ======== agents ==================================================================================


class Replay(nn.Module):
    """An actor for the scripts' play(): hands out stored logits, a row for each state asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.asked = nn.Parameter(logits, requires_grad=False), 0

    def forward(self, observations: Tensor) -> Tensor:
        self.asked += len(observations)
        return self.logits[self.asked - len(observations) : self.asked]


def lake_frames(row: dict) -> list[np.ndarray]:
    """The greedy walk of a stored policy, by fl.play()."""
    args = fl.parse_args(["--adv_estimator", "ppo", "--seed", "0"])
    args.greedy = True
    lakes = fl.build_lakes([tuple(row["map"].split("/"))], False, "onehot", torch.device("cpu"))
    actor = Replay(torch.tensor(row["probs"]).log()[lakes.live[0]])
    return fl.play(actor, args, lakes, "rgb_array")[0]


def pole_frames(row: dict) -> list[np.ndarray]:
    """A stored episode, by cp.play(): every fourth frame."""
    args = cp.parse_args([])
    args.greedy = True
    actions = torch.tensor([int(a) for a in row["actions"]])
    return cp.play(Replay(nn.functional.one_hot(actions, 2).float()), args, "rgb_array")[0]


def agent(part: str, policy: str = "ppo") -> list[dict]:
    return [row for row in results("curves")[part] if row["policy"] == policy]


def frozen_lake_gif(path: Path) -> None:
    """PPO's greedy walks over the three maps, each with a rest at the goal."""
    walks = [lake_frames(row) for row in agent("lake_agents")]
    frames = [frame for walk in walks for frame in [*walk, walk[-1], walk[-1]]]
    path.write_bytes(fl.gif_bytes(frames, 350))


def cartpole_gif(path: Path) -> None:
    """PPO's greedy agent in real time: every fourth step of 1/50 s."""
    (row,) = agent("cartpole_agent")
    path.write_bytes(cp.gif_bytes(pole_frames(row), 80))


def draw_policy(axes: Axes, row: dict) -> None:
    """A map: each cell's four triangles shaded by probability, arrows for the most likely."""
    maps, probs = row["map"].split("/"), np.array(row["probs"])
    corners = {0: ((0, 0), (0, 1)), 1: ((0, 1), (1, 1)), 2: ((1, 1), (1, 0)), 3: ((1, 0), (0, 0))}
    ways = {0: (-1, 0), 1: (0, 1), 2: (1, 0), 3: (0, -1)}  # left, down, right, up; y goes down
    arrow = {"arrowstyle": "-|>", "color": "black", "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    for index, p in enumerate(probs):
        y, x = divmod(index, len(maps[0]))
        tile = maps[y][x]
        middle = np.array([x + 0.5, y + 0.5])
        if tile in "HG":
            face = BLACK if tile == "H" else GREEN
            axes.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=face, edgecolor="0.5"))
            name = "hole" if tile == "H" else "goal"
            axes.text(*middle, name, ha="center", va="center", color="white", fontsize=9)
            continue
        for action, triangle in corners.items():
            points = [middle, *(np.array(c) + (x, y) for c in triangle)]
            axes.add_patch(plt.Polygon(points, facecolor=SHADES(p[action]), lw=0))
            if p[action] > 0.95 * p.max() > 0:
                way = 0.3 * np.array(ways[action])
                start = middle - way if p[action] > 0.6 else middle  # room for a second one
                axes.annotate("", middle + way, start, arrowprops=arrow)
        axes.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, edgecolor="0.5"))
        if tile == "S":
            axes.text(x + 0.06, y + 0.05, "S", va="top", weight="bold", fontsize=9)
    axes.set(xlim=(0, len(maps[0])), ylim=(len(maps), 0), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def policy_arrows(path: Path) -> None:
    """Unseen maps: before training, after it by PPO and GRPO, and all shortest ways."""
    found = groups(results("curves")["lake_agents"], "policy")
    figure, panels = canvas(8.6, 7.6, 3, len(found))
    titles = {"ppo": "PPO", "grpo": "GRPO (gamma 1)"}
    for column, ((name,), rows) in zip(panels.T, found.items(), strict=True):
        column[0].set_title(titles.get(name, name))
        for axes, row in zip(column, rows, strict=True):
            draw_policy(axes, row)
            numbers = f"sampled {row['sampled']:.3f}, greedy {row['greedy']:.0f}"
            axes.set_xlabel("" if name == "shortest ways" else numbers, fontsize=9)
    scale = plt.cm.ScalarMappable(plt.Normalize(0, 1), SHADES)
    label = "probability of an action (triangle on its side of the cell); arrow: most likely"
    figure.colorbar(scale, ax=panels, location="bottom", shrink=0.5, aspect=40, label=label)
    save(figure, path)


def overview(path: Path) -> None:
    """A strip for the README: both learning curves and both agents."""
    mosaic = [["lake", "pole", "walk"], ["lake", "pole", "balance"]]
    figure, panels = canvas(11, 3.4, mosaic, width_ratios=[4, 4, 2.2])
    lake, pole = panels["lake"], panels["pole"]
    lake_curves(lake, "sampled")
    lake.set(title="FrozenLake, unseen maps", ylabel="exact success")
    lake.legend(loc="center right", title="5 seeds, median thick")
    found = groups(results("curves")["cartpole"], "line")
    colors = {"ppo": (BLUE, "PPO"), "reinforce": (GREEN, "REINFORCE"), "grpo": (ORANGE, "GRPO")}
    for name, (color, label) in colors.items():
        draw_seeds(pole, found[name,], "env_steps", "sampled", color, label)
    draw_level(pole, 475, "solved: 475", x=0.3)
    pole.set(title="CartPole, unseen starts", xlabel="environment steps", ylabel="return")
    panels["walk"].set_title("trained agents")
    pole.set(xscale="log", xlim=(1e3, 1e6), ylim=(0, 540))
    pole.legend(loc="lower right")
    walk = lake_frames(agent("lake_agents")[0])
    balance = pole_frames(agent("cartpole_agent")[0])
    for name, frame in {"walk": walk[len(walk) // 2], "balance": balance[10]}.items():
        panels[name].imshow(frame)
        panels[name].set_axis_off()
    save(figure, path)


# ======== formulas ================================================================================


def surrogate_and_slope(ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective at these ratios, and its gradient with respect to the ratio."""
    ratio = ratio.clone().requires_grad_()
    objective = cp.clipped_surrogate(ratio, torch.full_like(ratio, advantage), 0.2, 0.2)
    (slope,) = torch.autograd.grad(objective.sum(), ratio)
    return objective.detach(), slope


def clip(path: Path) -> None:
    """The clipped objective and its gradient over the ratio, for a good and for a bad action."""
    ratio = torch.linspace(0.3, 1.7, 1402, dtype=torch.float64)
    figure, panels = canvas(8, 5, 2, 2, sharex=True, sharey="row")
    for (top, bottom), advantage in zip(panels.T, (1.0, -1.0), strict=True):
        objective, slope = surrogate_and_slope(ratio, advantage)
        top.plot(ratio, ratio * advantage, "--", color="0.5", label="ratio * A, not clipped")
        top.plot(ratio, objective, color=BLUE, linewidth=2.4, label="clipped objective")
        bottom.plot(ratio, slope, color=ORANGE, linewidth=2.4, label="its gradient")
        flat = ratio[slope == 0]
        for axes in (top, bottom):
            axes.axvspan(float(flat[0]), float(flat[-1]), color="0.93", zorder=0)
            axes.axvline(1, color="0.7", linewidth=1)
        good, sign = ("good", ">") if advantage > 0 else ("bad", "<")
        top.set_title(f"A {sign} 0, a {good} action")
        bottom.set(
            xlabel="ratio pi / pi_old (epsilon 0.2)", xticks=[0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6]
        )
        bottom.text(float(flat.mean()), 0.25 * advantage, "no pull", ha="center", va="center")
        top.margins(x=0)
    panels[0, 0].set_ylabel("objective, in units of |A|")
    panels[1, 0].set_ylabel("derivative in the ratio,\nin units of |A|")
    panels[0, 0].legend(loc="lower right", fontsize=9)
    save(figure, path)


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
    figure, axes = canvas(6, 3.6)
    for form, (color, style) in FORMS.items():
        axes.plot(x, pull(form, x, 1.0), style, color=color, label=form, linewidth=2.4)
    axes.set(ylim=(-1.2, 1.2), xlabel="score difference dR, in units of T", ylabel="pull")
    axes.axhline(0, color="0.7", linewidth=1, zorder=0)
    axes.axvline(0, color="0.7", linewidth=1, zorder=0)
    axes.legend(loc="upper left")
    save(figure, path)


# ======== what the benchmarks measured ============================================================


def bias_and_noise(path: Path) -> None:
    """Share off the true direction against noise, from the results of benchmarks/oracle.py."""
    rows = results("oracle")["default"]
    figure, both = canvas(10, 4, 1, 2)
    names = ["reinforce", "rloo", "actor_critic", "actor_critic:learned", "gae", "loss_type:grpo"]
    for axes, point, more in zip(both, ("start", "half"), ([], ["ppo"]), strict=True):
        shown = [r for r in rows if r["point"] == point and r["estimator"] in names + more]
        for row in shown:
            x, low = row["off"], row["estimator"] == "reinforce" and point == "start"
            axes.errorbar(x, row["noise"], xerr=row["off_se"], fmt="o", color=BLUE, ecolor="0.75")
            axes.annotate(
                row["estimator"], (x, row["noise"]), (6, -12 if low else 4),
                textcoords="offset points", fontsize=9,
            )  # fmt: skip
        axes.set(title=f"{point}, J {shown[0]['return']:.3f}", xlim=(-0.05, 0.45))
        axes.set_ylim(0, 1.15 * max(row["noise"] for row in shown))
        axes.set_xlabel("off: sine of the angle of the mean to the truth")
    both[0].set_ylabel("noise to signal of one batch")
    save(figure, path)


def horizon(path: Path) -> None:
    """How far branches must look: return and flat groups over the horizon (cartpole.json)."""
    found = groups(results("cartpole")["horizons"], "line")
    ticks = ["1", "2", "5", "10", "20", "40", "grows"]
    figure, (left, right) = canvas(9, 3.8, 1, 2)
    for reward, color, shift in (("survival", BLUE, -0.13), ("shaped", ORANGE, 0.13)):
        lines = {k: found.get((f"{tick}, {reward}",)) for k, tick in enumerate(ticks)}
        for axes, field in ((left, "fresh_sampled"), (right, "flat")):
            y = {k: draw_points(axes, v, field, k, color, shift) for k, v in lines.items() if v}
            x = [k + shift for k in y]
            axes.plot(x, list(y.values()), color=color, linewidth=1, label=f"{reward} reward")
            axes.set(
                xticks=range(len(ticks)), xticklabels=ticks, xlabel="horizon, steps of a branch"
            )
    draw_level(left, 475, "solved: 475", x=0.7, above=False)
    left.set(ylabel="sampled return, 1,000 fresh episodes", ylim=(0, 540))
    left.set_title("return when solved, or after a million steps")
    right.set(ylabel="share of flat groups", ylim=(0, 1.06), title="groups that teach nothing")
    right.legend(loc="center")
    save(figure, path)


def reward_hacking(path: Path) -> None:
    """Score beside truth over the pull to the reference, from the results of rlhf.py."""
    rows = [row | {"beta": row["line"].split()[-1]} for row in results("rlhf")["beta"]]
    sft = [row for row in results("rlhf")["all"] if row["stage"] == "sft"]
    betas = [*dict.fromkeys(sorted((float(row["beta"]), row["beta"]) for row in rows))]
    figure, panels = canvas(9, 3.8, 1, 2)
    fields = {
        "rm_score": ("the reward model's score", "score, standard deviations of SFT texts"),
        "true_positive": ("the truth", "share of texts that are truly positive"),
    }
    for axes, (field, (title, label)) in zip(panels, fields.items(), strict=True):
        draw_level(axes, statistics.median(row[field] for row in sft), "before (SFT)")
        for (stage,), some in groups(rows, "stage").items():
            color, name = ESTIMATORS[stage]
            shift = -0.12 if stage == "ppo" else 0.12
            middles = {
                k: draw_points(axes, here, field, k, color, shift)
                for k, (_, b) in enumerate(betas)
                if (here := [row for row in some if row["beta"] == b])
            }
            x = [k + shift for k in middles]
            axes.plot(x, [*middles.values()], color=color, linewidth=1, label=name)
        names = [b for _, b in betas]
        axes.set(title=title, ylabel=label, xticks=range(len(betas)), xticklabels=names)
        axes.set(xlabel="beta, pull to the reference policy", xlim=(-0.5, len(betas) - 0.5))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    panels[1].legend(loc="lower right")
    save(figure, path)


PICTURES: tuple[Callable[[Path], None], ...] = (
    overview, learning_frozen_lake, learning_cartpole, learning_text_env, policy_arrows, clip,
    horizon, reward_hacking, pairwise_weights, bias_and_noise,
)  # fmt: skip
FIGURES = {f"{draw.__name__}.png": draw for draw in PICTURES}
FIGURES |= {"frozen_lake.gif": frozen_lake_gif, "cartpole.gif": cartpole_gif}


def main(folder: Path = IMAGES, names: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        FIGURES[name](folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="default: all")
    main(names=parser.parse_args().names)
