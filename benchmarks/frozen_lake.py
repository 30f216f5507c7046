"""Every number of docs/frozen_lake.md about frozen_lake_ppo_grpo.py, measured again.

Run:  python benchmarks/frozen_lake.py                all parts, about 70 minutes on two CPU cores
      python benchmarks/frozen_lake.py sampling runs  only these; the other parts' results stay
      python benchmarks/frozen_lake.py --tables       only write the tables of docs anew

Results go to benchmarks/results/frozen_lake.json, tables to the pages of docs and README (between
their `<!-- table NAME -->` marks). Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from common import Benchmark, groups, spread, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

import frozen_lake_ppo_grpo as fl  # noqa: E402

# the documented lines; the estimator and the seed come on top
PLAIN = ""
SLIPPERY = (
    "--frozen_lake_slippery --batch_size 64 --group_size 16 --actor_learning_rate 1e-3 "
    "--entropy_coef 0.05 --gamma 0.995 --max_steps 1000"
)
LARGE = "--frozen_lake_size 8 --exploring_starts 0.9 --batch_size 64 --max_steps 600"
ARTICLE = (
    "--batch_size 32 --group_size 8 --num_updates_per_batch 1 --actor_learning_rate 1e-4 "
    "--max_steps 1000 --gamma 0.9 --lam 0.95 --clip_epsilon 0.2 "
    "--entropy_coef 0 --critic_loss_coef 1 --max_grad_norm 0.5 --feature_size 128 "
    "--state_encoding scalar --no-anneal"
)
SMALL_SLIPPERY = "--frozen_lake_slippery --actor_learning_rate 1e-3 --max_steps 600"
COLLAPSE = {
    "as the default run, at learning rate 1e-3": "",
    "learning rate 3e-4": "--actor_learning_rate 3e-4",
    "64 maps x 16 episodes": "--batch_size 64 --group_size 16",
    "advantages divided by the batch's std": "--scale_rewards batch",
    "entropy bonus 0.01": "--entropy_coef 0.01",
    "entropy bonus 0.05": "--entropy_coef 0.05",
}
SEEDS = range(5)
FRESH_SEEDS = range(100, 105)  # not looked at while the flags were chosen


def train(flags: str, estimator: str, seed: int) -> dict:
    """One run in a temporary folder; its result, its last metrics and when it first was solved."""
    with tempfile.TemporaryDirectory() as folder:
        common = (
            f"--adv_estimator {estimator} --seed {seed} --output_dir {folder} --quiet --threads 0"
        )
        args = fl.parse_args([*shlex.split(flags), *shlex.split(common)])
        result = fl.train(args)
        rows = Path(result["run_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(row) for row in rows]
        checkpoint = fl.load_checkpoint(str(Path(result["run_dir"], "checkpoint-last.pt")))
    actor = fl.conv_net(*fl.network_shape(args), outputs=4)
    actor.load_state_dict(checkpoint["parts"]["actor"])
    tail = rows[-20:]
    mean = lambda name: statistics.mean(row[name] for row in tail)  # noqa: E731
    reached = [row for row in rows if row.get("eval/sampled", 0) >= 0.99]
    return {
        "estimator": estimator,
        "seed": seed,
        **{k: result[k] for k in ("sampled", "greedy", "optimum", "uniform", "maps")},
        **different_maps(actor, args),
        **greedy_ends(actor, args),
        "updates": result["step"],
        "env_steps": result["env_steps"],
        "train_seconds": result["train_seconds"],
        "seconds_to_0.99": reached[0]["charts/train_seconds"] if reached else None,
        "length": mean("charts/episodic_length"),
        "entropy": mean("losses/entropy"),
        "flat": mean("group/zero_std_frac"),
        "flat_first_20": statistics.mean(row["group/zero_std_frac"] for row in rows[:20]),
        "curve": [
            [row["step"], row["eval/sampled"], row["eval/greedy"]]
            for row in rows
            if "eval/sampled" in row
        ],
    }


def different_maps(actor: torch.nn.Module, args: argparse.Namespace, number: int = 1000) -> dict:
    """The same evaluation on `number` unseen maps of which no two are equal: rarer, harder ones."""
    if args.frozen_lake_size > 4:  # there no two are equal anyway
        return {}
    rng, maps = np.random.default_rng(0), {}
    while len(maps) < number:
        maps |= dict.fromkeys(fl.draw_maps(rng, 1000, args.frozen_lake_size, held_out=True))
    device = torch.device("cpu")
    some = list(maps)[:number]
    lakes = fl.build_lakes(some, args.frozen_lake_slippery, args.state_encoding, device)
    result = fl.evaluate(actor, lakes, args.max_episode_steps)
    return {f"different_{k}": result[f"eval/{k}"] for k in ("sampled", "greedy", "optimum")}


def greedy_ends(actor: torch.nn.Module, args: argparse.Namespace) -> dict:
    """Shares of the unseen maps on which argmax falls, never ends, and there stands still."""
    if args.frozen_lake_slippery:
        return {}
    lakes = fl.Trainer(args).eval_lakes
    table = torch.nn.functional.one_hot(fl.evaluate_cells(actor, lakes).argmax(dim=1), 4)
    limit, generator = args.max_episode_steps, torch.Generator()
    walk = fl.sample_batch(table.float().log(), lakes, lakes.start, 1, limit, generator)
    still = walk.truncated.any(dim=1) & (walk.cells[:, -1] == walk.next_cells[:, -1])
    return {
        "greedy_falls": (walk.terminated & (walk.rewards == 0)).any(dim=1).float().mean().item(),
        "greedy_never_ends": walk.truncated.any(dim=1).float().mean().item(),
        "greedy_stands_still": still.float().mean().item(),
    }


def grid(lines: dict[str, str], estimators: list[str], seeds=SEEDS) -> list[dict]:
    """All runs of these lines x estimators x seeds."""
    jobs = [(name, e, seed) for name in lines for e in estimators for seed in seeds]
    bar = tqdm(jobs, desc="runs", dynamic_ncols=True)
    return [{"line": name} | train(lines[name], e, seed) for name, e, seed in bar]


def part_plain() -> list[dict]:
    """The default runs, 4x4 without slipping: success, time, where greedy ends."""
    return grid({"not slippery": PLAIN}, ["ppo", "grpo", "rloo"])


def part_fresh() -> list[dict]:
    """The default runs on five more seeds that no flag was chosen on."""
    return grid({"not slippery": PLAIN}, ["ppo", "grpo"], FRESH_SEEDS)


def part_slippery() -> list[dict]:
    """4x4 with slipping: success and time."""
    return grid({"slippery": SLIPPERY}, ["ppo", "grpo", "rloo"])


def part_greedy() -> list[dict]:
    """Why greedy lags: GRPO under five discounts."""
    return grid({f"{g}": f"--gamma {g}" for g in (1, 0.99, 0.95, 0.9, 0.8)}, ["grpo"])


def part_collapse() -> list[dict]:
    """Slippery ice with small batches: what keeps a run from one action everywhere."""
    return grid({k: f"{SMALL_SLIPPERY} {v}" for k, v in COLLAPSE.items()}, ["grpo"]) + grid(
        {"as the default run, at learning rate 1e-3": f"{SMALL_SLIPPERY} --gamma 0.995",
         "entropy bonus 0.05": f"{SMALL_SLIPPERY} --gamma 0.995 --entropy_coef 0.05",
         "entropy bonus 0.05, gamma 1": f"{SMALL_SLIPPERY} --gamma 1 --entropy_coef 0.05"}, ["ppo"]
    )  # fmt: skip


def part_halves() -> list[dict]:
    """The halves of 4x4 maps (as in draw_maps): share of gymnasium's draws, holes, success."""
    draws = [tuple(fl.generate_random_map(4, seed=seed)) for seed in range(4000)]
    rows = []
    for name, held_out in (("training", False), ("unseen", True)):
        some = [r for r in draws if (zlib.crc32("".join(r).encode()) % 2 == 0) == held_out]
        lakes = fl.build_lakes(some, False, "onehot", torch.device("cpu"))
        uniform = torch.full((*lakes.live.shape, 4), 0.25)
        rows.append(
            {
                "half": name,
                "share": len(some) / len(draws),
                "holes": statistics.mean("".join(r).count("H") for r in some),
                "uniform": fl.from_start(fl.success_probability(lakes, 100, uniform), lakes),
            }
        )
    return rows


def part_constant() -> list[dict]:
    """Slippery ice: exact success of the four policies that do the same everywhere."""
    trainer = fl.Trainer(fl.parse_args(["--frozen_lake_slippery", "--adv_estimator", "grpo"]))
    lakes, rows = trainer.eval_lakes, []
    for action, name in enumerate(("left", "down", "right", "up")):
        policy = torch.zeros(*lakes.live.shape, 4)
        policy[..., action] = 1
        success = fl.from_start(fl.success_probability(lakes, 100, policy), lakes)
        rows.append({"policy": f"always {name}", "success": success})
    uniform = fl.evaluate(trainer.actor, lakes, 100)["eval/uniform"]
    return [*rows, {"policy": "uniform", "success": uniform}]


def part_large() -> list[dict]:
    """8x8, with exploring starts and without."""
    without = "--frozen_lake_size 8 --batch_size 64 --max_steps 100"
    found = grid({"exploring starts": LARGE}, ["ppo", "grpo"])
    return found + grid({"without": without}, ["ppo", "grpo"])


def part_article() -> list[dict]:
    """All settings of the article at once, 3 seeds."""
    name, critic = "article's settings", " --critic_learning_rate 3e-4"
    return [
        *grid({name: ARTICLE + critic}, ["ppo"], range(3)),
        *grid({name: ARTICLE}, ["grpo"], range(3)),
    ]


def plain_loop(
    actor: torch.nn.Module, lakes: fl.Lakes, group_size: int, limit: int
) -> tuple[int, float]:
    """The article's way: one environment, one forward pass, one step at a time. (steps, seconds)"""
    start, logp_old = time.perf_counter(), []
    for index, rows in enumerate(lakes.maps):
        env = gym.make("FrozenLake-v1", desc=list(rows), is_slippery=False, max_episode_steps=limit)
        first = index * lakes.live.shape[1]
        for _ in range(group_size):
            cell, _ = env.reset()
            done = False
            while not done:
                with torch.no_grad():
                    logits = actor(fl.observe(lakes, torch.tensor([first + cell])))
                    policy = torch.distributions.Categorical(logits=logits)
                    action = policy.sample()
                    logp_old.append(policy.log_prob(action).item())
                cell, _, terminated, truncated, _ = env.step(action.item())
                done = terminated or truncated
        env.close()
    return len(logp_old), time.perf_counter() - start


def part_sampling() -> list[dict]:
    """Steps a second of sampling: new maps, the policy, the walk; both ways in turn, 5 repeats."""
    args = fl.parse_args(["--adv_estimator", "grpo", "--eval_maps", "1"])
    rows = []
    for channels, maps, group_size in ((32, 32, 8), (128, 32, 8), (32, 64, 16)):
        args.feature_size = channels
        trainer = fl.Trainer(args)
        for repeat in range(5):
            lakes = trainer.make_lakes(trainer.rng, 32, held_out=False)
            slow_steps, slow_seconds = plain_loop(trainer.actor, lakes, 8, 100)
            fast_steps, start = 0, time.perf_counter()
            for _ in range(40):
                lakes = trainer.make_lakes(trainer.rng, maps, held_out=False)
                table = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
                sizes = group_size, 100, trainer.generator
                batch = fl.sample_batch(table, lakes, lakes.start, *sizes)
                fast_steps += int(batch.mask.sum())
            fast_seconds = time.perf_counter() - start
            rows.append(
                {
                    "channels": channels,
                    "maps": maps,
                    "group_size": group_size,
                    "repeat": repeat,
                    "one_pass_per_step": slow_steps / slow_seconds,
                    "table": fast_steps / fast_seconds,
                }
            )
    return rows


def part_scaling() -> list[dict]:
    """Seconds per update of an untrained policy as batch_size x group_size grows 8-fold twice."""
    rows = []
    for estimator in ("ppo", "grpo"):
        for batch_size, group_size in ((8, 4), (32, 8), (128, 16)):
            sizes = ["--batch_size", str(batch_size), "--group_size", str(group_size)]
            flags = ["--adv_estimator", estimator, *sizes, "--actor_learning_rate", "0"]
            trainer = fl.Trainer(fl.parse_args([*flags, "--eval_maps", "1"]))
            for _ in range(10):
                trainer.update()
            seconds, env_steps = [], trainer.env_steps
            for _ in range(30):
                start = time.perf_counter()
                trainer.update()
                seconds.append(time.perf_counter() - start)
            rows.append(
                {
                    "estimator": estimator,
                    "batch_size": batch_size,
                    "group_size": group_size,
                    "milliseconds": 1000 * statistics.median(seconds),
                    "env_steps": (trainer.env_steps - env_steps) / 30,
                }
            )
    return rows


PARTS = {
    "sampling": part_sampling,
    "scaling": part_scaling,
    "plain": part_plain,
    "fresh": part_fresh,
    "slippery": part_slippery,
    "greedy": part_greedy,
    "halves": part_halves,
    "constant": part_constant,
    "collapse": part_collapse,
    "large": part_large,
    "article": part_article,
}


# ---- tables: medians, with (lowest-highest) of the seeds -----------------------------------------


def table_runs(rows: list[dict]) -> str:
    header = ["4x4", "estimator", "sampled", "greedy", "optimum", "best of the two / optimum"]
    header += ["updates", "environment steps, million", "training, s"]
    body = []
    for (line, estimator), some in groups(rows, "line", "estimator").items():
        share = [{"share": max(r["sampled"], r["greedy"]) / r["optimum"]} for r in some]
        body.append(
            [line, estimator, spread(some, "sampled", 4), spread(some, "greedy", 4)]
            + [f"{some[0]['optimum']:.4f}", spread(share, "share"), str(some[0]["updates"])]
            + [spread(some, "env_steps", 2, 1e-6), spread(some, "train_seconds", 1)]
        )
    return table(header, body)


def table_fresh(rows: list[dict]) -> str:
    body = []
    for (estimator,), some in groups(rows, "estimator").items():
        solved = sum(row["sampled"] >= 0.99 * row["optimum"] for row in some)
        body.append([estimator, f"{solved} of {len(some)}"])
        body[-1] += [spread(some, k, 4) for k in ("sampled", "greedy")]
    return table(["other seeds", "solved", "sampled", "greedy"], body)


def table_different(rows: list[dict]) -> str:
    header = ["4x4", "estimator", "sampled", "greedy", "optimum", "best of the two / optimum"]
    body = []
    for (line, estimator), some in groups(rows, "line", "estimator").items():
        found = [
            {k: row[f"different_{k}"] for k in ("sampled", "greedy", "optimum")} for row in some
        ]
        share = [{"share": max(r["sampled"], r["greedy"]) / r["optimum"]} for r in found]
        body.append(
            [line, estimator, spread(found, "sampled", 4), spread(found, "greedy", 4)]
            + [f"{found[0]['optimum']:.4f}", spread(share, "share")]
        )
    return table(header, body)


def table_greedy(rows: list[dict]) -> str:
    body = [
        [gamma, spread(some, "sampled", 4), spread(some, "greedy", 4), spread(some, "length", 1)]
        + [spread(some, f"greedy_{k}") for k in ("falls", "never_ends", "stands_still")]
        for (gamma,), some in groups(rows, "line").items()
    ]
    header = ["gamma", "sampled", "greedy", "episode, steps"]
    header += ["greedy falls", "greedy never ends", "of that, stands still"]
    return table(header, body)


def table_collapse(rows: list[dict]) -> str:
    header = [
        "estimator",
        "variant",
        "sampled",
        "greedy",
        "entropy",
        "episode, steps",
        "flat groups",
    ]
    body = [
        [estimator, line, *(spread(some, k) for k in ("sampled", "greedy", "entropy"))]
        + [spread(some, "length", 1), spread(some, "flat", 2)]
        for (estimator, line), some in groups(rows, "estimator", "line").items()
    ]
    return table(header, body)


def table_halves(rows: list[dict]) -> str:
    body = [
        [r["half"], f"{r['share']:.2f}", f"{r['holes']:.2f}", f"{r['uniform']:.3f}"] for r in rows
    ]
    return table(["half", "share of draws", "holes a map", "success of chance"], body)


def table_constant(rows: list[dict]) -> str:
    return table(["policy", "success"], [[r["policy"], f"{r['success']:.4f}"] for r in rows])


def table_large(rows: list[dict]) -> str:
    header = ["8x8", "estimator", "sampled", "greedy", "flat groups, first 20 updates"]
    header += ["updates", "training, s"]
    body = [
        [line, estimator, spread(some, "sampled"), spread(some, "greedy")]
        + [spread(some, "flat_first_20", 2), str(some[0]["updates"])]
        + [spread(some, "train_seconds", 0)]
        for (line, estimator), some in groups(rows, "line", "estimator").items()
    ]
    return table(header, body)


def table_article(rows: list[dict]) -> str:
    body = [
        [estimator, spread(some, "sampled"), spread(some, "greedy"), str(some[0]["updates"])]
        + [spread(some, "train_seconds", 0)]
        for (estimator,), some in groups(rows, "estimator").items()
    ]
    return table(["estimator", "sampled", "greedy", "updates", "training, s"], body)


def table_sampling(rows: list[dict]) -> str:
    body = []
    for (channels, maps, size), some in groups(rows, "channels", "maps", "group_size").items():
        ratio = [{"ratio": r["table"] / r["one_pass_per_step"]} for r in some]
        body.append(
            [f"{maps} x {size}", str(channels), spread(some, "one_pass_per_step", 0)]
            + [spread(some, "table", 0), spread(ratio, "ratio", 0)]
        )
    header = [
        "maps x episodes",
        "channels",
        "one pass per step, steps/s",
        "table, steps/s",
        "ratio",
    ]
    return table(header, body)


def table_scaling(rows: list[dict]) -> str:
    body = [
        [r["estimator"], f"{r['batch_size']} x {r['group_size']}", f"{r['env_steps']:.0f}"]
        + [f"{r['milliseconds']:.1f}"]
        for r in rows
    ]
    return table(["estimator", "maps x episodes", "steps an update", "ms an update"], body)


def table_overview(rows: list[dict]) -> str:
    header = ["FrozenLake 4x4", "estimator", "sampled / optimum", "greedy / optimum", "training, s"]
    body = []
    for (line, estimator), some in groups(rows, "line", "estimator").items():
        shares = [{k: r[k] / r["optimum"] for k in ("sampled", "greedy")} for r in some]
        body.append(
            [line, estimator, spread(shares, "sampled"), spread(shares, "greedy")]
            + [spread(some, "train_seconds", 0)]
        )
    return table(header, body)


TABLES = {
    "overview": (["plain", "slippery"], table_overview),
    "runs": (["plain", "slippery"], table_runs),
    "fresh": (["fresh"], table_fresh),
    "different": (["plain", "slippery"], table_different),
    "greedy": (["greedy"], table_greedy),
    "halves": (["halves"], table_halves),
    "constant": (["constant"], table_constant),
    "collapse": (["collapse"], table_collapse),
    "large": (["large"], table_large),
    "article": (["article"], table_article),
    "sampling": (["sampling"], table_sampling),
    "scaling": (["scaling"], table_scaling),
}


BENCHMARK = Benchmark("frozen_lake", PARTS, TABLES, ["frozen_lake.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
