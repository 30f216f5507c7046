"""Learning curves and trained agents for the pictures of docs/images, measured again.

Run:  python benchmarks/curves.py               all parts, about 4 minutes on one CPU core
      python benchmarks/curves.py text_env      only these; the other parts' results stay

Results go to benchmarks/results/curves.json; benchmarks/figures.py draws them. Every run has the
default flags of its script; a curve is kept as columns, an agent as what it does.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common import Benchmark  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

import cartpole_grpo as cg  # noqa: E402
import cartpole_pg_family as cp  # noqa: E402
import frozen_lake_ppo_grpo as fl  # noqa: E402
import text_env_pairwise_grpo as te  # noqa: E402

LAKE_SEEDS = range(5)  # those of the table
SEEDS = range(320, 325)  # no flag was chosen on them, no table is made of them
AGENT_SEED = 42  # the scripts' default
TARGETS = {"hello": 100, "thequickbrownfoxjumpsoverthelazy": 250}  # updates
FORMS = ("pairwise_logistic", "pairwise_linear", "group_norm")


def rounded(values: Tensor | list, digits: int = 4) -> list:
    return [round(float(value), digits) for value in values]


def lake_trainer(estimator: str, seed: int) -> fl.Trainer:
    flags = ["--adv_estimator", estimator, "--seed", str(seed), "--quiet"]
    return fl.Trainer(fl.parse_args(flags))


def part_frozen_lake() -> list[dict]:
    """Exact success on unseen maps, every tenth update."""
    rows = []
    for estimator, seed in tqdm([(e, s) for e in ("ppo", "grpo") for s in LAKE_SEEDS]):
        trainer, points = lake_trainer(estimator, seed), []
        while True:
            if trainer.step % 10 == 0:
                found = fl.evaluate(trainer.actor, trainer.eval_lakes, 100)
                points.append((trainer.step, found["eval/sampled"], found["eval/greedy"]))
            if trainer.step == trainer.args.max_steps:
                break
            trainer.update()
        steps, sampled, greedy = zip(*points, strict=True)
        row = {"estimator": estimator, "seed": seed, "updates": list(steps)}
        row |= {k: round(found[f"eval/{k}"], 4) for k in ("optimum", "uniform")}
        rows.append(row | {"sampled": rounded(sampled), "greedy": rounded(greedy)})
    return rows


def cartpole_run(script, flags: list[str], seed: int) -> dict:
    """A run that stops as train() does; its curve is evaluated every 15 % more steps."""
    args = script.parse_args([*flags, "--seed", str(seed), "--quiet"])
    trainer, points, due, done = script.Trainer(args), [], 0.0, False
    while not done:
        before = trainer.env_steps
        if points:
            trainer.update()
        step = trainer.env_steps
        judged = step // args.eval_every > before // args.eval_every
        over = step >= args.max_steps
        if judged or over or step >= due:
            found = script.evaluate(trainer.actor, trainer.eval_envs, trainer.device)
            done = judged and min(found.values()) >= args.target_return
        done |= over
        if step >= due or done:
            points.append((step, found["eval/sampled"]))
            due = max(1000, 1.15 * step)
    steps, sampled = zip(*points, strict=True)
    return {"seed": seed, "env_steps": list(steps), "sampled": rounded(sampled, 1)}


def part_cartpole() -> list[dict]:
    """Mean sampled return of 100 unseen episodes until both evaluations are at the threshold."""
    lines = {name: (cp, ["--adv_estimator", name]) for name in cp.PHI}
    lines["cartpole_grpo.py"] = cg, []
    jobs = [(line, seed) for line in lines for seed in SEEDS]
    return [{"line": line} | cartpole_run(*lines[line], seed) for line, seed in tqdm(jobs)]


def part_text_env() -> list[dict]:
    """Exact expected return against texts, for a short and a long target; nothing stops."""
    rows = []
    jobs = [(target, form, seed) for target in TARGETS for form in FORMS for seed in SEEDS]
    for target, form, seed in tqdm(jobs):
        flags = ["--target", target, "--adv_estimator", form, "--seed", str(seed), "--quiet"]
        trainer, points = te.Trainer(te.parse_args(flags)), []
        for step in range(TARGETS[target] + 1):
            if step % (TARGETS[target] // 50) == 0:
                found = te.evaluate(trainer.log_probs(), trainer.target)
                texts = step * trainer.args.num_trajectories
                points.append((texts, found["eval/expected_return"]))
            trainer.update()
        texts, returns = zip(*points, strict=True)
        row = {"target": target, "form": form, "seed": seed, "texts": list(texts)}
        rows.append(row | {"expected_return": rounded(returns, 3)})
    return rows


def shortest_ways(lakes: fl.Lakes) -> Tensor:
    """(B, S, 4): even chances of the actions that begin a shortest way to the goal; else 0."""
    limits = range(1 + lakes.live.shape[1])
    reached = torch.stack([fl.success_probability(lakes, limit) for limit in limits])  # (L, B, S)
    distance = (reached == 0).sum(dim=0)  # (B, S): steps to the goal
    goal = (lakes.prob * lakes.reward).sum(dim=-1) > 0  # (B, S, 4)
    after = distance.gather(1, lakes.next_cell.flatten(1)).view_as(goal)  # (B, S, 4), K is 1
    best = (goal | (after == distance[..., None] - 1)) & lakes.live[..., None]
    return best / best.sum(dim=-1, keepdim=True).clamp(min=1)


def odd_maps(trainer: fl.Trainer) -> list[fl.Rows]:
    """The first two unseen maps with 4 holes, and the first where argmax does not arrive."""
    lakes = trainer.eval_lakes
    logits = fl.evaluate_cells(trainer.actor, lakes).view(*lakes.live.shape, 4)
    arrives = fl.success_probability(lakes, 100, F.one_hot(logits.argmax(dim=-1), 4))
    arrives = arrives.gather(1, lakes.start[:, None]).squeeze(1).tolist()
    plain = [m for m in lakes.maps if "".join(m).count("H") == 4]
    lost = [m for m, p in zip(lakes.maps, arrives, strict=True) if p == 0]
    return [*dict.fromkeys(plain)][:2] + lost[:1]


def part_lake_agents() -> list[dict]:
    """Policies on three unseen maps: action probabilities of every cell, exact success."""
    trainers = {e: lake_trainer(e, AGENT_SEED) for e in ("ppo", "grpo")}
    untrained = copy.deepcopy(trainers["ppo"].actor)
    for trainer in trainers.values():
        for _ in range(trainer.args.max_steps):
            trainer.update()
    maps = odd_maps(trainers["grpo"])
    lakes = fl.build_lakes(maps, False, "onehot", torch.device("cpu"))

    def policy(actor: nn.Module) -> Tensor:
        logits = fl.evaluate_cells(actor, lakes)
        return logits.softmax(dim=1).view(*lakes.live.shape, 4)

    policies = {"untrained": policy(untrained)}
    policies |= {name: policy(trainer.actor) for name, trainer in trainers.items()}
    policies["shortest ways"] = shortest_ways(lakes)
    rows = []
    for name, probs in policies.items():
        greedy = F.one_hot(probs.argmax(dim=-1), 4)
        sampled, most_likely = (
            fl.success_probability(lakes, 100, p).gather(1, lakes.start[:, None]).squeeze(1)
            for p in (probs, greedy)
        )
        for k, tiles in enumerate(lakes.maps):
            row = {"policy": name, "map": "/".join(tiles), "sampled": round(float(sampled[k]), 4)}
            row |= {"greedy": round(float(most_likely[k]), 4)}
            rows.append(row | {"probs": [rounded(p, 3) for p in probs[k]]})
    return rows


class Recorder(nn.Module):
    """An actor that notes its most likely actions."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor, self.actions = actor, ""

    def forward(self, observation: Tensor) -> Tensor:
        logits = self.actor(observation)  # (1, 2)
        self.actions += str(int(logits.argmax()))
        return logits


def part_cartpole_agent() -> list[dict]:
    """The greedy actions of an episode, untrained and once PPO has solved CartPole."""
    args = cp.parse_args(["--seed", str(AGENT_SEED), "--quiet"])
    trainer, rows = cp.Trainer(args), []
    args.greedy = True
    for name in ("untrained", "ppo"):
        while name == "ppo":
            trainer.update()
            found = cp.evaluate(trainer.actor, trainer.eval_envs, trainer.device)
            if min(found.values()) >= args.target_return:
                break
        recorder = Recorder(trainer.actor)
        _, total = cp.play(recorder, args, None)
        rows.append({"policy": name, "return": total, "actions": recorder.actions})
    return rows


PARTS = {name[5:]: part for name, part in list(globals().items()) if name.startswith("part_")}
BENCHMARK = Benchmark("curves", PARTS, {}, [])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
