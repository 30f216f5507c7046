"""Every number of docs/cartpole_pg_family.md and docs/cartpole_grpo.md, measured again.

Run:  python benchmarks/cartpole.py             all parts, about 40 minutes on one CPU core
      python benchmarks/cartpole.py solve       only these; the other parts' results stay
      python benchmarks/cartpole.py --tables    only write the tables of docs anew

Results go to benchmarks/results/cartpole.json, tables to the pages of docs and README (between
their `<!-- table NAME -->` marks). Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from common import ROOT, Benchmark, groups, spread, table  # noqa: E402
from torch import nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

import cartpole_grpo as cg  # noqa: E402
import cartpole_pg_family as cp  # noqa: E402

SEEDS = range(300, 310)  # the default flags were chosen on others, see the page
FRESH = cp.UNSEEN + 1  # starts on which no run was stopped
EVERY = 5000  # environment steps between two evaluations of the family (its default) and SB3
BRANCH_SEEDS = range(300, 320)

BASELINES = ("trajectory_mean", "batch_time_mean")
LINES = {name: f"--adv_estimator {name}" for name in cp.PHI}
MEANS = {f"baseline, {b}": f"--adv_estimator baseline --baseline {b}" for b in BASELINES}
# the notes' own flags, with the environment steps that their printed code took (1,000 episodes)
ONE = "--env_id CartPole-v0 --gamma 0.9 --num_envs 1 --actor_learning_rate 2e-4"
NOTES = {
    "vanilla": f"{ONE} --adv_estimator vanilla --max_steps 25000",
    "reinforce": f"{ONE} --adv_estimator reinforce --max_steps 40000",
    "baseline, trajectory_mean": f"{ONE} --adv_estimator baseline --baseline trajectory_mean "
    "--max_steps 60000",
    "grpo": "--env_id CartPole-v0 --gamma 0.9 --num_envs 10 --group_size 10 --adv_estimator grpo "
    "--actor_learning_rate 2e-2 --max_steps 180000",
}


def fresh_returns(policy, env_id: str) -> dict:
    """Mean returns of 1,000 further episodes, greedy and sampled."""
    found = cp.evaluate(policy, cp.make_envs(env_id, 2000), "cpu", FRESH)
    return {f"fresh_{name[5:]}": float(value) for name, value in found.items()}


def train(line: str, flags: str, seed: int, script=cp) -> dict:
    """One run. CPU and wall seconds of sampling and updating, without evaluation and logging."""
    seconds, plain = {"cpu": 0.0}, script.Trainer.update

    def timed(self) -> None:
        start = time.process_time()
        plain(self)
        seconds["cpu"] += time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        common = f"--seed {seed} --output_dir {folder} --quiet --threads 1"
        args = script.parse_args([*shlex.split(flags), *shlex.split(common)])
        script.Trainer.update = timed
        try:
            result = script.train(args)
        finally:
            script.Trainer.update = plain
        checkpoint = script.load_checkpoint(str(Path(result["run_dir"], "checkpoint-last.pt")))
    actor = script.mlp(args.hidden_size, 2, 0.01)
    actor.load_state_dict(checkpoint["parts"]["actor"])
    names = ("solved", "greedy", "sampled", "env_steps", "updates", "auc", "flat", "horizon")
    return {
        "line": line,
        "seed": seed,
        **{name: result[name] for name in names if name in result},
        "cpu_seconds": seconds["cpu"],
        "wall_seconds": result["train_seconds"],
        **fresh_returns(actor, args.env_id),
    }


def train_sb3(seed: int) -> dict:
    """Stable-Baselines3's PPO with rl-zoo's settings for CartPole, judged as ours are."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    envs, threshold = cp.make_envs("CartPole-v1", 200), 475

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return model.policy.get_distribution(observation).distribution.logits

    class Judge(BaseCallback):
        spent, result, due = [0.0, 0.0], {}, EVERY

        def _on_step(self) -> bool:
            return not self.result or min(self.result.values()) < threshold

        def _on_rollout_start(self) -> None:  # the rollout before has been learned from
            if self.num_timesteps >= self.due:
                start = time.process_time(), time.perf_counter()
                self.due += EVERY
                self.result = cp.evaluate(policy, envs, "cpu")
                self.spent[0] += time.process_time() - start[0]
                self.spent[1] += time.perf_counter() - start[1]

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: left * 1e-3,
        clip_range=lambda left: left * 0.2,
        seed=seed,
        device="cpu",
    )
    judge, start = Judge(), (time.process_time(), time.perf_counter())
    judge.spent = [0.0, 0.0]
    model.learn(100_000, callback=judge)
    cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
    found = {name[5:]: float(value) for name, value in judge.result.items()}
    return {
        "line": "SB3 PPO",
        "seed": seed,
        "solved": min(found.values()) >= threshold,
        **found,
        "env_steps": judge.num_timesteps,
        "cpu_seconds": cpu - judge.spent[0],
        "wall_seconds": wall - judge.spent[1],
        **fresh_returns(policy, "CartPole-v1"),
    }


def grid(lines: dict[str, str], seeds=SEEDS, script=cp) -> list[dict]:
    """All runs of these lines x seeds."""
    jobs = [(name, seed) for name in lines for seed in seeds]
    bar = tqdm(jobs, desc="runs", dynamic_ncols=True)
    return [train(name, lines[name], seed, script) for name, seed in bar]


def part_solve() -> list[dict]:
    """Every estimator and SB3's PPO, seed by seed in turn: what slows one slows all."""
    rows = []
    for seed in tqdm(SEEDS, desc="seeds", dynamic_ncols=True):
        rows += [train(name, flags, seed) for name, flags in (LINES | MEANS).items()]
        rows.append(train_sb3(seed))
    order = [*LINES, *MEANS, "SB3 PPO"]
    return sorted(rows, key=lambda row: order.index(row["line"]))


def part_v0() -> list[dict]:
    """Every estimator on CartPole-v0."""
    return grid({k: f"{v} --env_id CartPole-v0" for k, v in LINES.items()}, SEEDS[:5])


def part_discount() -> list[dict]:
    """Erratum 11: the weight G(tau) of vanilla under a discount."""
    lines = {str(g): f"--adv_estimator vanilla --gamma {g}" for g in (0.9, 0.99)}
    lines |= {"1": "--adv_estimator vanilla"}
    return grid({k: f"{v} --max_steps 300000" for k, v in lines.items()}, SEEDS[:5])


def part_normalize() -> list[dict]:
    """PPO's advantages as they are, over the batch, over minibatches."""
    kinds = ("none", "batch", "minibatch")
    return grid({k: f"--adv_estimator ppo --normalize_advantages {k}" for k in kinds})


def part_nsteps() -> list[dict]:
    """n of the n-step advantage."""
    lines = {str(n): f"--adv_estimator nstep --num_steps 64 --n_steps {n}" for n in (1, 5, 16, 64)}
    return grid({k: f"{v} --max_steps 500000" for k, v in lines.items()}, SEEDS[:5])


def part_passes() -> list[dict]:
    """Passes over a batch for GRPO: too many stop it."""
    lines = {str(n): f"--adv_estimator grpo --update_epochs {n}" for n in (1, 3, 10)}
    return grid({k: f"{v} --max_steps 500000" for k, v in lines.items()}, SEEDS[:5])


def part_notes() -> list[dict]:
    """The notes' flags, for as many steps as their printed code took."""
    return grid({k: f"{v} --target_return 0" for k, v in NOTES.items()}, SEEDS[:5])


def part_branch() -> list[dict]:
    """cartpole_grpo.py beside the family's PPO and GRPO and SB3's PPO, seed by seed in turn."""
    rows = []
    for seed in tqdm(BRANCH_SEEDS, desc="seeds", dynamic_ncols=True):
        rows.append(train("cartpole_grpo.py", "", seed, cg))
        rows += [train(name, LINES[name], seed) for name in ("ppo", "grpo")]
        rows.append(train_sb3(seed))
    order = ["cartpole_grpo.py", "ppo", "grpo", "SB3 PPO"]
    return sorted(rows, key=lambda row: order.index(row["line"]))


def part_horizons() -> list[dict]:
    """Branches of fixed length, and growing, under two rewards."""
    lines = {f"{h}, survival": f"--horizon {h}" for h in (1, 2, 5, 10, 20, 40)}
    lines |= {"grows, survival": ""}
    lines |= {f"{h}, shaped": f"--horizon {h} --reward shaped" for h in (1, 2, 5, 10, 20, 40)}
    return grid({k: f"{v} --max_steps 1000000" for k, v in lines.items()}, SEEDS[:5], cg)


def part_cures() -> list[dict]:
    """What else keeps groups from going flat."""
    lines = {"grows (default)": "", "20 steps": "--horizon 20"}
    lines |= {"20 steps, shaped reward": "--horizon 20 --reward shaped"}
    lines |= {"20 steps, random visits": "--horizon 20 --random_visits 0.3"}
    lines |= {"grows, random visits": "--random_visits 0.3"}
    return grid({k: f"{v} --max_steps 1000000" for k, v in lines.items()}, SEEDS[:5], cg)


def part_group() -> list[dict]:
    """512 branches an update, in groups of another size, or not compared at all."""
    lines = {}
    for estimator in ("grpo", "rloo", "none"):
        for size in (2, 4, 8, 16, 32):
            flags = f"--group_size {size} --num_states {512 // size} --visit_steps {size}"
            lines[f"{estimator}, {size}"] = f"--adv_estimator {estimator} {flags}"
    return grid({k: f"{v} --max_steps 1000000" for k, v in lines.items()}, SEEDS[:5], cg)


def bare_seconds(trainer: cp.Trainer, updates: int) -> float:
    """CPU of the bare work: the same steps with given actions, the same passes of the nets."""
    args, envs = trainer.args, cp.make_envs(trainer.args.env_id, trainer.args.num_envs)
    envs.reset(seed=0)
    actor, critic = cp.mlp(64, 2, 1.0), cp.mlp(64, 1, 1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], fused=True)
    observation = torch.zeros(args.num_envs, 4)
    rows = args.num_envs * args.num_steps
    actions = [envs.action_space.sample() for _ in range(args.num_steps)]
    sizes = [args.minibatch_size or rows] * (rows // (args.minibatch_size or rows))
    batches = [(torch.randn(n, 4), torch.randint(2, (n, 1)), torch.randn(n)) for n in sizes]
    everything = torch.randn(args.num_envs, args.num_steps + 1, 4)
    start = time.process_time()
    for _ in range(updates):
        with torch.no_grad():
            for action in actions:
                actor(observation)
                envs.step(action)
            critic(everything)
        for _ in range(args.update_epochs or 1):
            for x, action, target in batches:
                logp = actor(x).log_softmax(dim=1).gather(1, action).squeeze(1)
                loss = (logp * target).mean() + (critic(x).squeeze(1) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
                optimizer.step()
    return time.process_time() - start


def part_overhead() -> list[dict]:
    """A script's updates beside the bare work of the same size, in turn."""
    rows = []
    for name, updates in (("actor_critic", 1000), ("gae", 400), ("ppo", 20)):
        for repeat in range(5):
            args = cp.parse_args(["--adv_estimator", name, "--quiet", "--seed", str(repeat)])
            trainer = cp.Trainer(args)
            trainer.update()
            bare = bare_seconds(trainer, updates)
            start = time.process_time()
            for _ in range(updates):
                trainer.update()
            ours = time.process_time() - start
            rows.append({"line": name, "updates": updates, "bare": bare, "ours": ours})
    return rows


def part_startup() -> list[dict]:
    """CPU seconds from nothing to the end of the first update, beside torch and its optimiser."""
    torch_only = "import torch; torch.optim.Adam([torch.zeros(1, requires_grad=True)])"
    ours = "import cartpole_pg_family as cp; cp.Trainer(cp.parse_args(['--quiet'])).update()"
    timed = "\nimport time; print(time.process_time())"
    rows = []
    for _ in range(5):
        row = {}
        for name, code in (("torch", torch_only), ("ours", ours)):
            command = [sys.executable, "-c", code + timed]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            row[name] = float(done.stdout)
        rows.append(row)
    return rows


PARTS = {
    "solve": part_solve,
    "v0": part_v0,
    "discount": part_discount,
    "normalize": part_normalize,
    "nsteps": part_nsteps,
    "passes": part_passes,
    "notes": part_notes,
    "branch": part_branch,
    "horizons": part_horizons,
    "cures": part_cures,
    "group": part_group,
    "overhead": part_overhead,
    "startup": part_startup,
}


# ---- tables: medians, with (lowest-highest) of the seeds -----------------------------------------


def table_solve(rows: list[dict]) -> str:
    header = ["estimator", "solved", "environment steps, thousand", "CPU, s", "wall, s"]
    header += ["1,000 fresh episodes: greedy", "sampled"]
    body = [
        [line, f"{sum(row['solved'] for row in some)} of {len(some)}"]
        + [spread(some, "env_steps", 0, 1e-3), spread(some, "cpu_seconds", 2)]
        + [spread(some, "wall_seconds", 2)]
        + [spread(some, f"fresh_{k}", 0) for k in ("greedy", "sampled")]
        for (line,), some in groups(rows, "line").items()
    ]
    return table(header, body)


def table_overview(rows: list[dict]) -> str:
    found = groups(rows, "line")
    theirs = statistics.median(row["cpu_seconds"] for row in found["SB3 PPO",])
    header = ["CartPole-v1", "solved", "environment steps, thousand", "CPU, s", "SB3 PPO / this"]
    body = []
    for (line,), some in found.items():
        ours = statistics.median(row["cpu_seconds"] for row in some)
        solved = f"{sum(row['solved'] for row in some)} of {len(some)}"
        body.append([line, solved, spread(some, "env_steps", 0, 1e-3)])
        body[-1] += [spread(some, "cpu_seconds", 1), f"{theirs / ours:.1f}"]
    return table(header, body)


def table_lines(head: str):
    def make(rows: list[dict]) -> str:
        header = [head, "solved", "environment steps, thousand", "greedy", "sampled"]
        body = [
            [line, f"{sum(row['solved'] for row in some)} of {len(some)}"]
            + [spread(some, "env_steps", 0, 1e-3)]
            + [spread(some, f"fresh_{k}", 0) for k in ("greedy", "sampled")]
            for (line,), some in groups(rows, "line").items()
        ]
        return table(header, body)

    return make


def table_flat(head: str):
    def make(rows: list[dict]) -> str:
        header = [head, "solved", "environment steps, thousand", "flat", "last horizon"]
        header += ["greedy", "sampled"]
        body = [
            [line, f"{sum(row['solved'] for row in some)} of {len(some)}"]
            + [spread(some, "env_steps", 0, 1e-3), spread(some, "flat", 2)]
            + [spread(some, "horizon", 0)]
            + [spread(some, f"fresh_{k}", 0) for k in ("greedy", "sampled")]
            for (line,), some in groups(rows, "line").items()
        ]
        return table(header, body)

    return make


def table_notes(rows: list[dict]) -> str:
    body = [
        [line, spread(some, "env_steps", 0, 1e-3)]
        + [spread(some, f"fresh_{k}", 0) for k in ("greedy", "sampled")]
        for (line,), some in groups(rows, "line").items()
    ]
    return table(["estimator", "environment steps, thousand", "greedy", "sampled"], body)


def table_overhead(rows: list[dict]) -> str:
    body = []
    for (line,), some in groups(rows, "line").items():
        per = [{k: 1e3 * r[k] / r["updates"] for k in ("bare", "ours")} for r in some]
        ratio = [{"ratio": r["ours"] / r["bare"]} for r in some]
        body.append(
            [line, spread(per, "bare", 2), spread(per, "ours", 2), spread(ratio, "ratio", 2)]
        )
    return table(["estimator", "bare work, ms an update", "script, ms an update", "ratio"], body)


def table_startup(rows: list[dict]) -> str:
    ratio = [{"ratio": r["ours"] / r["torch"]} for r in rows]
    body = [[spread(rows, "torch", 2), spread(rows, "ours", 2), spread(ratio, "ratio", 2)]]
    return table(["torch and an optimiser, s", "script to its first update, s", "ratio"], body)


TABLES = {
    "solve": (["solve"], table_solve),
    "cartpole": (["solve"], table_overview),
    "v0": (["v0"], table_lines("CartPole-v0")),
    "discount": (["discount"], table_lines("gamma")),
    "normalize": (["normalize"], table_lines("normalised over")),
    "nsteps": (["nsteps"], table_lines("n")),
    "passes": (["passes"], table_lines("passes")),
    "notes": (["notes"], table_notes),
    "branch": (["branch"], table_overview),
    "horizons": (["horizons"], table_flat("horizon, reward")),
    "cures": (["cures"], table_flat("horizon")),
    "group": (["group"], table_flat("estimator, group")),
    "overhead": (["overhead"], table_overhead),
    "startup": (["startup"], table_startup),
}
BENCHMARK = Benchmark("cartpole", PARTS, TABLES, ["cartpole_pg_family.md", "cartpole_grpo.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
