"""The failure galleries and the answers to the exercises of docs/, measured again.

Run:  python benchmarks/exercises.py               all parts, about 20 minutes on one CPU core
      python benchmarks/exercises.py text_env      only these pages; the others' results stay
      python benchmarks/exercises.py --tables      only write the tables of docs anew

Results go to benchmarks/results/exercises.json, tables to the pages (between their
`<!-- table NAME -->` marks). A gallery's command and its cure are run as printed there.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from common import Benchmark, edited, groups, spread, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

import cartpole_grpo as cg  # noqa: E402
import cartpole_pg_family as cp  # noqa: E402
import frozen_lake_ppo_grpo as fl  # noqa: E402
import policy_gradient_oracle as oracle  # noqa: E402
import tiny_gpt_rlhf as gpt  # noqa: E402

SEEDS = range(400, 403)
LAST = 10  # logged rows over which a tag is averaged; of eval/* the last one counts


@dataclass
class Failure:
    """A row of a gallery. {tag:2}: its value, 2 digits; in `cure` that of the mended command."""

    see: str
    command: str
    cause: str
    cure: str
    cured: str  # the mended command


@torch.no_grad()
def units_on(args, checkpoint: Path) -> float:
    """Share of the second convolution's outputs above 0, in 4,096 cells of unseen maps."""
    trainer = fl.Trainer(args)
    trainer.load_model(str(checkpoint))
    index = trainer.eval_lakes.live.flatten().nonzero().squeeze(1)[:4096]
    return (trainer.actor[:4](fl.observe(trainer.eval_lakes, index)) > 0).float().mean().item()


def run(command: str, seed: int) -> dict[str, float]:
    """One run of a command: what train() returns, and every tag; `first:` of its first row."""
    script, *flags = shlex.split(command.removeprefix("python "))
    module = importlib.import_module(script.removesuffix(".py"))
    if module.SCRIPT.startswith("frozen"):
        flags.append("--eval_every=0")  # the last evaluation is the same
    with tempfile.TemporaryDirectory() as folder:
        if module is gpt:
            flags = [*SMALL.split(), *flags, *given(command, seed, folder)]
        common = f"--quiet --save_steps 0 --threads 1 --seed {seed} --output_dir {folder}"
        args = module.parse_args([*flags, *shlex.split(common)])
        if hasattr(module, "add_gif"):
            with mock.patch.multiple(module, play=lambda *a: ([], 0), add_gif=lambda *a: None):
                result = module.train(args)
        else:
            result = module.train(args)
        logs = Path(result["last"]).parent if module is gpt else Path(result["run_dir"])
        text = Path(logs, "metrics.jsonl").read_text(encoding="utf-8")
        found: dict[str, float] = {"seed": seed}
        if module is fl:
            found["on"] = units_on(args, Path(result["run_dir"], "checkpoint-last.pt"))
        if command in MADE.values():
            KEPT[command, seed] = Path(result["last"]).read_bytes()
    tags: dict[str, list[float]] = {}
    for row in map(json.loads, text.splitlines()):
        for name, value in row.items():
            if value is not None:
                tags.setdefault(name, []).append(value)
    for name, values in tags.items():
        last = values[-1:] if name.startswith("eval") else values[-LAST:]
        found |= {name: sum(last) / len(last), f"first:{name}": values[0]}
    return found | {k: v for k, v in result.items() if isinstance(v, bool | int | float)}


# ---- the galleries -------------------------------------------------------------------------------

FROZEN = "python frozen_lake_ppo_grpo.py"
BRANCH = "python cartpole_grpo.py"
FAMILY = "python cartpole_pg_family.py"
TEXT = "python text_env_pairwise_grpo.py"
ORACLE = "python policy_gradient_oracle.py"
GPT = "python tiny_gpt_rlhf.py"
LONG = "--target thequickbrownfoxjumpsoverthelazy"

# of every command of tiny_gpt_rlhf.md, and what the stages after them start from
SMALL = (
    "--reviews 2000 --eval_texts 200 --evaluations 1 --temperature 0.8 --sft_batch 32 "
    "--rm_batch 64 --num_prompts 16 --group_size 8 --update_epochs 2 --minibatch_size 64 "
    "--dpo_batch 32"
)
MADE = {
    "sft": f"{GPT} --stage sft --sft_steps 600 --sft_rate 5e-3",
    "rm": f"{GPT} --stage rm --reviews 2000 --rm_steps 200 --rm_rate 2e-3 --rm_loss bradley_terry",
}
KEPT: dict[tuple[str, int], bytes] = {}  # their checkpoints, by command and seed
PPO = f"{GPT} --stage ppo --ppo_steps 30"
DPO = f"{GPT} --stage dpo --dpo_pairs data"


def given(command: str, seed: int, folder: str) -> list[str]:
    """--sft_checkpoint and --rm_checkpoint, as far as the command's stage needs them."""
    stage = command.split("--stage ")[1].split()[0]
    flags = []
    for name in gpt.STAGES[: min(2, gpt.STAGES.index(stage))]:
        if (MADE[name], seed) not in KEPT:
            run(MADE[name], seed)
        path = Path(folder, f"{name}.pt")
        path.write_bytes(KEPT[MADE[name], seed])
        flags += [f"--{name}_checkpoint", str(path)]
    return flags


FAILURES = {
    "frozen_lake": [
        Failure(
            "`losses/entropy` {losses/entropy:2} after a few updates, `eval/sampled` "
            "{eval/sampled:3}, greedy the same",
            f"{FROZEN} --adv_estimator grpo --frozen_lake_slippery --max_steps 150",
            "one action in all cells: [slippery ice](#slippery-ice)",
            "`--entropy_coef 0.05`: entropy {losses/entropy:2}, sampled {eval/sampled:3}, greedy "
            "{eval/greedy:3}",
            f"{FROZEN} --adv_estimator grpo --frozen_lake_slippery --max_steps 150 "
            "--entropy_coef 0.05",
        ),
        Failure(
            "`score/mean` {score/mean:2}, `group/zero_std_frac` {group/zero_std_frac:2}",
            f"{FROZEN} --adv_estimator grpo --frozen_lake_size 8 --max_steps 30",
            "groups in which nobody arrives teach nothing",
            "`--exploring_starts 0.9`: `score/mean` {score/mean:2}, from nearer starts; from S "
            "`eval/sampled` {eval/sampled:3} follows later ([large maps](#large-maps))",
            f"{FROZEN} --adv_estimator grpo --frozen_lake_size 8 --max_steps 30 "
            "--exploring_starts 0.9",
        ),
        Failure(
            "`losses/clipfrac` {losses/clipfrac:3}, `losses/approx_kl` {losses/approx_kl:3}; "
            "`eval/sampled` {eval/sampled:3}",
            f"{FROZEN} --num_updates_per_batch 1 --max_steps 60",
            "one gradient step a batch: the ratio is 1",
            "`--num_updates_per_batch 4`: `losses/clipfrac` {losses/clipfrac:3}, `eval/sampled` "
            "{eval/sampled:3}",
            f"{FROZEN} --num_updates_per_batch 4 --max_steps 60",
        ),
        Failure(
            "`losses/clipfrac` {losses/clipfrac:3} and `losses/approx_kl` {losses/approx_kl:3}, "
            "with four passes; `losses/entropy` {losses/entropy:2}, near ln 2; `eval/sampled` "
            "{eval/sampled:3}",
            f"{FROZEN} --actor_learning_rate 0.03 --max_steps 60",
            "dead units: share of the second convolution's outputs above 0, in 4,096 cells of "
            "unseen maps, {on:3}. Whatever the cell, the policy is the same, down or right",
            "`--actor_learning_rate 2e-3`: share {on:3}, `eval/sampled` {eval/sampled:3}",
            f"{FROZEN} --actor_learning_rate 2e-3 --max_steps 60",
        ),
        Failure(
            "`eval/sampled` {eval/sampled:3}, `eval/greedy` {eval/greedy:3}",
            f"{FROZEN} --adv_estimator grpo --max_steps 150",
            "at gamma 1 a wasted step costs nothing: "
            "[greedy lags](#the-greedy-policy-lags---gamma-099)",
            "`--gamma 0.99`: sampled {eval/sampled:3}, greedy {eval/greedy:3}",
            f"{FROZEN} --adv_estimator grpo --max_steps 150 --gamma 0.99",
        ),
    ],
    "cartpole_grpo": [
        Failure(
            "`group/zero_std_frac` {group/zero_std_frac:2} from the first row on; last lines: all "
            "groups were flat; `eval/sampled` {eval/sampled:0}",
            f"{BRANCH} --horizon 1 --max_steps 50000",
            "one step cannot tell the actions apart ([erratum 9](errata.md))",
            "`--horizon 2 --reward shaped`: flat {group/zero_std_frac:2}, sampled {eval/sampled:0}",
            f"{BRANCH} --horizon 2 --reward shaped --max_steps 50000",
        ),
        Failure(
            "`group/zero_std_frac` {group/zero_std_frac:2} at the end, `eval/sampled` "
            "{eval/sampled:0}",
            f"{BRANCH} --horizon 20 --max_steps 500000",
            "nearly every branch is still up after 20 steps",
            "no `--horizon`, so that it grows (to {horizon:0}): flat {group/zero_std_frac:2}, "
            "sampled {eval/sampled:0}",
            f"{BRANCH} --max_steps 500000",
        ),
        Failure(
            "`losses/policy_loss` {losses/policy_loss:0}, `losses/clipfrac` {losses/clipfrac:2}, "
            "`eval/sampled` {eval/sampled:0}",
            f"{BRANCH} --adv_estimator none --max_steps 500000",
            "no comparison: every action is pushed up, by what its branch earned",
            "`--adv_estimator grpo`: `losses/policy_loss` {losses/policy_loss:3}, sampled "
            "{eval/sampled:0}",
            f"{BRANCH} --adv_estimator grpo --max_steps 500000",
        ),
        Failure(
            "`losses/approx_kl` {losses/approx_kl:2}, `losses/entropy` {losses/entropy:2}, "
            "`eval/sampled` {eval/sampled:0}",
            f"{BRANCH} --learning_rate 0.1 --max_steps 300000",
            "steps too long: the clip stops a row's gradient only after the step that moved it",
            "`--learning_rate 1e-3`: `losses/approx_kl` {losses/approx_kl:3}, entropy "
            "{losses/entropy:2}, sampled {eval/sampled:0}",
            f"{BRANCH} --learning_rate 1e-3 --max_steps 300000",
        ),
    ],
    "cartpole_pg_family": [
        Failure(
            "`eval/sampled` {eval/sampled:0} after 200,000 steps, `losses/entropy` "
            "{losses/entropy:2}",
            f"{FAMILY} --adv_estimator vanilla --gamma 0.9 --max_steps 200000",
            "under gamma 0.9 all long episodes are worth the same "
            "([G(tau) under a discount](#gtau-under-a-discount))",
            "`--gamma 1`: entropy {losses/entropy:2}, sampled {eval/sampled:0}",
            f"{FAMILY} --adv_estimator vanilla --gamma 1 --max_steps 200000",
        ),
        Failure(
            "`losses/entropy` {losses/entropy:3}, `eval/sampled` {eval/sampled:0}: always the same "
            "action",
            f"{FAMILY} --adv_estimator nstep --num_steps 64 --n_steps 1 --max_steps 100000",
            "the TD errors of a critic that knows nothing yet, at a learning rate of 3e-3",
            "`--n_steps 64`, so that the rewards speak: entropy {losses/entropy:2}, sampled "
            "{eval/sampled:0}; or smaller steps (`--actor_learning_rate 5e-4`), and many of them",
            f"{FAMILY} --adv_estimator nstep --num_steps 64 --n_steps 64 --max_steps 100000",
        ),
        Failure(
            "`losses/entropy` {losses/entropy:2}, `losses/clipfrac` {losses/clipfrac:2}, "
            "`eval/sampled` {eval/sampled:0}",
            f"{FAMILY} --adv_estimator ppo --actor_learning_rate 0.1 --max_steps 40000",
            "steps too long; the policy is sure of itself before it is good",
            "`--actor_learning_rate 3e-3`: clipfrac {losses/clipfrac:2}, entropy "
            "{losses/entropy:2}, sampled {eval/sampled:0}",
            f"{FAMILY} --adv_estimator ppo --actor_learning_rate 3e-3 --max_steps 40000",
        ),
        Failure(
            "`losses/approx_kl` {losses/approx_kl:3} and `losses/clipfrac` {losses/clipfrac:2} "
            "look well, `losses/entropy` {losses/entropy:2}, `eval/sampled` {eval/sampled:0}",
            f"{FAMILY} --adv_estimator grpo --update_epochs 10 --max_steps 100000",
            "ten passes over the same 32 episodes",
            "`--update_epochs 3`: entropy {losses/entropy:2}, sampled {eval/sampled:0}",
            f"{FAMILY} --adv_estimator grpo --update_epochs 3 --max_steps 100000",
        ),
    ],
    "text_env": [
        Failure(
            "`losses/entropy` {losses/entropy:2}, `group/zero_std_frac` {group/zero_std_frac:2}, "
            "`eval/greedy_right` {eval/greedy_right:0} of 5",
            f"{TEXT} --observation scalar --max_steps 300",
            "neighbouring positions look alike and get the same letter "
            "([why](#why-the-articles-run-does-not-learn))",
            "`--observation onehot`: {eval/greedy_right:0} of 5",
            f"{TEXT} --observation onehot --max_steps 300",
        ),
        Failure(
            "`losses/entropy` {losses/entropy:2}, `group/zero_std_frac` {group/zero_std_frac:2}, "
            "`eval/greedy_right` {eval/greedy_right:0} of 32",
            f"{TEXT} {LONG} --entropy_coef 0 --max_steps 300",
            "settled before all letters were seen",
            "`--entropy_coef 0.02`: {eval/greedy_right:0} of 32",
            f"{TEXT} {LONG} --entropy_coef 0.02 --max_steps 300",
        ),
        Failure(
            "`eval/greedy_right` {eval/greedy_right:0} of 32, yet `eval/expected_return` "
            "{eval/expected_return:1} and `losses/entropy` {losses/entropy:2}",
            f"{TEXT} {LONG} --entropy_coef 0.05 --max_steps 300",
            "the bonus outweighs the logistic form, whose pull is bounded",
            "`--entropy_coef 0.02`: `eval/expected_return` {eval/expected_return:1}, entropy "
            "{losses/entropy:2}",
            f"{TEXT} {LONG} --entropy_coef 0.02 --max_steps 300",
        ),
        Failure(
            "`group/zero_std_frac` {group/zero_std_frac:2}, `eval/greedy_right` "
            "{eval/greedy_right:0} of 4",
            f"{TEXT} --language chinese --num_trajectories 16 --max_steps 300",
            "with 3,759 characters nearly no text has a right one, and equal returns teach nothing",
            "`--num_trajectories 256`: flat {group/zero_std_frac:2}, right {eval/greedy_right:0}",
            f"{TEXT} --language chinese --num_trajectories 256 --max_steps 300",
        ),
    ],
    "policy_gradient_oracle": [
        Failure(
            "off and noise are `-`, scale {rloo.scale}",
            f"{ORACLE} --estimators rloo --batches 20 --points start",
            "J is 0.014: the few groups that are not flat are too few for a mean",
            "`--batches 2000`: scale {rloo.scale}, off {rloo.off}",
            f"{ORACLE} --estimators rloo --batches 2000 --points start",
        ),
        Failure(
            "scale {trajectory_mean.scale}, in every batch",
            f"{ORACLE} --estimators trajectory_mean --batches 200 --points half",
            "the baseline is the episode's own return: nothing is left ([erratum 12](errata.md))",
            "`batch_time_mean`: scale {batch_time_mean.scale}; `value`: {value.scale}",
            f"{ORACLE} --estimators batch_time_mean value --batches 1000 --points half",
        ),
        Failure(
            "`reinforce`: scale {reinforce.scale}, off {reinforce.off}",
            f"{ORACLE} --gamma 0.9 --estimators reinforce --batches 1000 --points half",
            "gamma^t before grad log pi is left out ([gamma below 1](#gamma-below-1))",
            "`--gamma 1`: scale {reinforce.scale}, off {reinforce.off}; or exercise 3",
            f"{ORACLE} --gamma 1 --estimators reinforce --batches 1000 --points half",
        ),
        Failure(
            "`ppo`: scale {ppo.scale}, off {ppo.off}",
            f"{ORACLE} --estimators ppo --batches 500 --points half",
            "four long gradient steps on one batch, and the clip",
            "`--inner_rate 0.1`, short steps: scale {ppo.scale}, off {ppo.off}",
            f"{ORACLE} --estimators ppo --inner_rate 0.1 --batches 500 --points half",
        ),
        Failure(
            "`k3:reward`: scale {k3:reward.scale}: it points away from the KL's gradient",
            f"{ORACLE} --estimators k3:reward --batches 500 --points trained",
            "k3 has the KL's value on average, not its gradient, when it is paid as a reward",
            "`k1:reward`: scale {k1:reward.scale}, off {k1:reward.off}",
            f"{ORACLE} --estimators k1:reward --batches 500 --points trained",
        ),
    ],
    "tiny_gpt_rlhf": [
        Failure(
            "`eval/grammatical` {eval/grammatical:3}, `eval/perplexity` {eval/perplexity:1}, "
            "though `eval/stopped` is {eval/stopped:3}",
            f"{GPT} --stage sft --sft_steps 40 --sft_rate 5e-3",
            "SFT cut short: what writes no reviews shows the reward model nothing that it knows",
            "`--sft_steps 600`: grammatical {eval/grammatical:3}, perplexity {eval/perplexity:2}",
            MADE["sft"],
        ),
        Failure(
            "`losses/accuracy` {losses/accuracy:3}, but `eval/pair_accuracy` "
            "{eval/pair_accuracy:2}",
            MADE["rm"].replace("--reviews 2000", "--reviews 200"),
            "the reward model has learned its few reviews by heart",
            "`--reviews 2000`: {losses/accuracy:3}, and {eval/pair_accuracy:2} of held-out pairs",
            MADE["rm"],
        ),
        Failure(
            "`eval/rm_score` {eval/rm_score:2}, `eval/true_positive` {eval/true_positive:2}, "
            "`eval/kl_text` {eval/kl_text:1}; `losses/approx_kl` {losses/approx_kl:4} is of one "
            "update and shows nothing",
            f"{PPO} --beta 0 --ppo_rate 1e-3",
            "[reward hacking](#reward-hacking): nothing holds the policy at the reference",
            "`--beta 0.1`: score {eval/rm_score:2}, truly positive {eval/true_positive:2}, KL "
            "{eval/kl_text:1}",
            f"{PPO} --beta 0.1 --ppo_rate 1e-3",
        ),
        Failure(
            "`eval/rm_score` {eval/rm_score:2}, but `eval/different` {eval/different:3}, "
            "`losses/entropy` {losses/entropy:3}, `eval/perplexity` {eval/perplexity:0}",
            f"{PPO} --beta 0.1 --ppo_rate 1e-2",
            "steps too long: a text a category is left, and of a sure policy nothing moves",
            "`--ppo_rate 1e-3`: different {eval/different:3}, entropy {losses/entropy:2}, "
            "perplexity {eval/perplexity:2}",
            f"{PPO} --beta 0.1 --ppo_rate 1e-3",
        ),
        Failure(
            "`dpo/accuracy` {dpo/accuracy:3}, `dpo/margin` {dpo/margin:1}, but `dpo/reward_chosen` "
            "{dpo/reward_chosen:1}, `eval/grammatical` {eval/grammatical:2}",
            f"{DPO} --dpo_steps 100 --dpo_beta 0.3 --dpo_rate 1.5e-3 --dpo_alpha 0",
            "the gap grows by pushing both texts down, the worse one more: [DPO](#dpo)",
            "`--dpo_alpha 3`: `dpo/reward_chosen` {dpo/reward_chosen:2}, grammatical "
            "{eval/grammatical:2}",
            f"{DPO} --dpo_steps 100 --dpo_beta 0.3 --dpo_rate 1.5e-3 --dpo_alpha 3",
        ),
    ],
}
TAG = re.compile(r"\{([\w/:.]+?)(?::(\d))?\}")


def oracle_row(command: str) -> dict:
    """One run of the oracle; `NAME.scale` and so on, as the script prints them."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{command.split('.py ')[1]} --quiet --output_dir {folder}"
        args = oracle.parse_args(shlex.split(flags))
        (point,) = oracle.run(args)["points"].values()
    return {
        f"{name}.{key}": oracle.cell(row, key, args.batches)
        for name, row in point["estimators"].items()
        for key in oracle.COLUMNS
    }


def gallery(page: str) -> list[dict]:
    """Rows of all failures of a page, and of their cures; only what the page shows."""
    rows: list[dict] = []
    runs: dict[str, list[dict]] = {}
    for k, failure in enumerate(tqdm(FAILURES[page], desc=f"{page}, gallery")):
        shown = {"see": failure.see + failure.cause, "cure": failure.cure}
        for kind, command in (("see", failure.command), ("cure", failure.cured)):
            if command not in runs:
                plain = page == "policy_gradient_oracle"
                runs[command] = (
                    [oracle_row(command)] if plain else [run(command, seed) for seed in SEEDS]
                )
            names = {name for name, _ in TAG.findall(shown[kind])} | {"seed"}
            for row in runs[command]:
                kept = {name: value for name, value in row.items() if name in names}
                rows.append({"failure": k, "kind": kind, "command": command} | kept)
    return rows


def table_gallery(page: str):
    def make(rows: list[dict]) -> str:
        found = groups([row for row in rows if "failure" in row], "failure", "kind")

        def fill(text: str, some: list[dict]) -> str:
            def value(match: re.Match) -> str:
                name, digits = match[1], match[2]
                return spread(some, name, int(digits)) if digits else some[0][name]

            return TAG.sub(value, text)

        body = [
            [
                fill(failure.see, found[k, "see"]),
                f"`{failure.command}`",
                fill(failure.cause, found[k, "see"]),
                fill(failure.cure, found[k, "cure"]),
            ]
            for k, failure in enumerate(FAILURES[page])
        ]
        return table(["what you see", "command", "cause", "cure, and what it shows"], body)

    return make


# ---- the exercises -------------------------------------------------------------------------------


def answers(exercise: int, lines: dict[str, str], names: tuple, edit=()) -> list[dict]:
    """Rows of an exercise: a line for each command, its seeds; edited where it is called so."""
    rows = []
    for line, command in lines.items():
        for seed in SEEDS:
            with edited(*edit) if "edited" in line else nullcontext():
                row = run(command, seed)
            kept = {name: row[name] for name in names}
            rows.append({"exercise": exercise, "line": line, "seed": seed} | kept)
    return rows


def part_frozen_lake() -> list[dict]:
    """Gallery; the clip in the first pass, leave-one-out against the mean, padding not masked."""
    rows = gallery("frozen_lake")
    lines = {
        f"{passes}, {clip}": f"{FROZEN} --max_steps 50 --num_updates_per_batch {passes} "
        f"--clip_epsilon {clip}"
        for passes in (1, 4)
        for clip in (0.2, 0.01)
    }
    rows += answers(1, lines, ("losses/clipfrac", "losses/approx_kl", "eval/sampled"))
    once = "--num_updates_per_batch 1 --max_steps 60"
    for size in (2, 8):
        common = f"{once} --group_size {size} --batch_size {256 // size}"
        lines = {
            f"{size}, `{flags}`": f"{FROZEN} --adv_estimator {flags} {common}"
            for flags in ("grpo --scale_rewards none", "rloo")
        }
        some = answers(2, lines, ("first:losses/grad_norm", "eval/sampled"))
        first = {r["seed"]: r["first:losses/grad_norm"] for r in some if "grpo" in r["line"]}
        rows += [r | {"ratio": r["first:losses/grad_norm"] / first[r["seed"]]} for r in some]
    edit = fl, "aggregate", ("per_step.masked_fill(~mask, 0.0)", "per_step")
    grpo = f"{FROZEN} --adv_estimator grpo --max_steps 60"
    lines = {
        f"{coef}, {how}": f"{grpo} --entropy_coef {coef}"
        for coef in (0, 0.1)
        for how in ("masked", "edited")
    }
    return rows + answers(3, lines, ("losses/entropy", "eval/sampled"), edit)


def part_cartpole_grpo() -> list[dict]:
    """Gallery; another integrator, groups with one action, flat groups kept."""
    rows = gallery("cartpole_grpo")
    new = 'envs.kinematics_integrator = "semi-implicit"\n    return envs'
    edit = cg, "make_envs", ("return envs", new)
    lines = {
        f"{horizon}, {reward}, {how}": f"{BRANCH} --max_steps 50000 --horizon {horizon} "
        f"--reward {reward}"
        for horizon, reward in ((1, "shaped"), (1, "survival"), (2, "survival"))
        for how in ("explicit", "edited")
    }
    rows += answers(1, lines, ("flat", "eval/sampled"), edit)
    for size in (2, 4, 8, 16):
        for seed in SEEDS:
            flags = f"--group_size {size} --learning_rate 0 --quiet --seed {seed}"
            trainer, same, plain = cg.Trainer(cg.parse_args(flags.split())), [], cg.prepare_inputs

            def recorded(args, batch, same=same, plain=plain):
                same.append((batch.actions == batch.actions[:, :1]).all(dim=1)[batch.mask])
                return plain(args, batch)

            with mock.patch.object(cg, "prepare_inputs", recorded):
                for _ in range(20):
                    trainer.update()
            share = torch.cat(same).float().mean().item()
            row = {"exercise": 2, "line": str(size), "seed": seed, "same": share}
            rows.append(row | {"predicted": 2.0 ** (1 - size)})
    edit = cg, "Trainer.update", ("else batch.mask & ~flat", "else batch.mask")
    lines = {"left out": f"{BRANCH} --max_steps 1000000", "edited": f"{BRANCH} --max_steps 1000000"}
    names = "solved", "env_steps", "updates"
    return rows + answers(3, lines, names, edit)


def part_cartpole_pg_family() -> list[dict]:
    """Gallery; the time limit as a fall, GAE as n-step, k1 beside k3."""
    rows = gallery("cartpole_pg_family")
    old = "ends = batch.terminated"
    edit = cp, "prepare_inputs", (old, old + " | batch.truncated")
    for line in ("as it is", "edited"):
        for seed in SEEDS:
            with edited(*edit) if line == "edited" else nullcontext():
                cut, plain = [], cp.prepare_inputs

                def recorded(args, batch, values, cut=cut, plain=plain):
                    advantages, returns = plain(args, batch, values)
                    cut.append(advantages[batch.truncated])
                    return advantages, returns

                with mock.patch.object(cp, "prepare_inputs", recorded):
                    found = run(f"{FAMILY} --max_steps 40000 --target_return 0", seed)
            row = {"exercise": 1, "line": line, "seed": seed, "cut": torch.cat(cut).mean().item()}
            rows.append(row | {name: found[name] for name in ("eval/greedy", "eval/sampled")})
    common = "--num_steps 8 --max_steps 40000"
    lines = {
        "gae, lambda 0": f"{FAMILY} --adv_estimator gae --lam 0 {common}",
        "nstep, n 1": f"{FAMILY} --adv_estimator nstep --n_steps 1 {common}",
        "gae, lambda 1": f"{FAMILY} --adv_estimator gae --lam 1 {common}",
        "nstep, n 8": f"{FAMILY} --adv_estimator nstep --n_steps 8 {common}",
    }
    rows += answers(2, lines, ("losses/entropy", "eval/greedy", "eval/sampled"))
    for seed in SEEDS:
        seen: dict[str, list] = {"k1": [], "k3": []}
        k3 = cp.kl_k3

        def both(logp, logp_ref, seen=seen, k3=k3):
            seen["k1"].append((logp - logp_ref).mean())
            seen["k3"].append(k3(logp, logp_ref).mean())
            return k3(logp, logp_ref)

        with mock.patch.object(cp, "kl_k3", both):
            run(f"{FAMILY} --max_steps 20000", seed)
        for line, values in seen.items():
            x = torch.stack(values)
            row = {"exercise": 3, "line": line, "seed": seed, "mean": x.mean().item()}
            rows.append(row | {"std": x.std().item(), "below": (x < -1e-6).float().mean().item()})
    return rows


def part_text_env() -> list[dict]:
    """Gallery; a small temperature and a larger entropy bonus."""
    rows = gallery("text_env")
    linear = f"{TEXT} {LONG} --adv_estimator pairwise_linear --max_grad_norm inf --max_steps 1000"
    lines = {
        f"{t}, {coef}": f"{linear} --temperature {t} --entropy_coef {coef}"
        for t, coef in ((1, 0.02), (0.1, 0.02), (0.1, 0.2))
    }
    names = "step", "first:losses/grad_norm", "losses/entropy", "eval/greedy_right"
    return rows + answers(2, lines, names)


def part_policy_gradient_oracle() -> list[dict]:
    """Gallery; groups of two, 1/abs(o_i) where lengths are equal, gamma^t put back."""
    rows = gallery("policy_gradient_oracle")

    def add(exercise: int, lines: dict[str, tuple[str, str]]) -> None:
        for line, (name, flags) in lines.items():
            found = oracle_row(f"{ORACLE} --points half --estimators {name} {flags}")
            row = {"exercise": exercise, "line": line}
            rows.append(row | {key: found[f"{name}.{key}"] for key in ("scale", "off", "noise")})

    pairs = "--batches 1000 --group_size 2 --num_groups 32"
    add(1, {f"`{name}`": (name, pairs) for name in ("grpo:none", "rloo")})
    free = "--batches 1000 --map SFFF/FFFF/FFFF/FFFG --no-frozen_lake_slippery"
    add(
        2,
        {
            f"`{name}`, {limit}": (name, f"{free} --max_episode_steps {limit}")
            for limit in (6, 8, 20)
            for name in ("grpo:none", "loss_type:grpo")
        },
    )
    gamma = "--batches 2000 --gamma 0.9"
    add(3, {"as it is": ("reinforce", gamma)})
    old = 'if name == "reinforce":\n        return returns'
    new = old + " * gamma ** torch.arange(returns.shape[1])"
    with edited(oracle, "compute_phi", (old, new)):
        add(3, {"edited": ("reinforce", gamma)})
    add(3, {"`vanilla`": ("vanilla", gamma)})
    return rows


def part_tiny_gpt_rlhf() -> list[dict]:
    """Gallery; DPO's first step, texts sampled at 0.8 and scored at 1."""
    rows = gallery("tiny_gpt_rlhf")
    lines = {
        str(beta): f"{DPO} --dpo_steps 1 --dpo_rate 0.1 --dpo_alpha 0 --dpo_beta {beta}"
        for beta in (0.1, 0.6)
    }
    names = "losses/policy_loss", "dpo/margin", "dpo/accuracy", "losses/grad_norm", "eval/kl_text"
    rows += answers(1, lines, names)
    old = "score_tokens(trainer.actor, batch.ids[part], args.temperature)"
    edit = gpt, "update_rl", (old, old.replace(", args.temperature", ""))
    flags = "--stage ppo --ppo_steps 1 --update_epochs 1 --minibatch_size 128 --beta 0.1"
    lines = {line: f"{GPT} {flags} --ppo_rate 5e-4" for line in ("0.8, as sampled", "edited: 1")}
    with mock.patch.dict(gpt.UPDATES, ppo=lambda trainer: gpt.update_rl(trainer)):
        some = answers(2, lines, ("losses/approx_kl", "losses/clipfrac"), edit)
    for row in some:
        row["losses/approx_kl"] = round(row["losses/approx_kl"], 6) + 0.0  # no -0
    return rows + some


PARTS = {name[5:]: part for name, part in list(globals().items()) if name.startswith("part_")}
COLUMNS: dict[tuple[str, int], list[tuple]] = {  # heading, or heading, field, digits
    ("frozen_lake", 1): [
        ("passes, epsilon",),
        ("`losses/clipfrac`", "losses/clipfrac", 3),
        ("`losses/approx_kl`", "losses/approx_kl", 4),
        ("`eval/sampled`", "eval/sampled", 6),
    ],
    ("frozen_lake", 2): [
        ("group size, estimator",),
        ("first gradient over grpo's", "ratio", 4),
        ("`eval/sampled`", "eval/sampled", 3),
    ],
    ("frozen_lake", 3): [
        ("entropy bonus, `aggregate()`",),
        ("`losses/entropy`", "losses/entropy", 3),
        ("`eval/sampled`", "eval/sampled", 6),
    ],
    ("cartpole_grpo", 1): [
        ("horizon, reward, integrator",),
        ("flat groups", "flat", 2),
        ("`eval/sampled`", "eval/sampled", 0),
    ],
    ("cartpole_grpo", 2): [
        ("group size",),
        ("groups with one action", "same", 4),
        ("2^(1 - G)", "predicted", 4),
    ],
    ("cartpole_grpo", 3): [
        ("flat groups",),
        ("solved", "solved", None),
        ("environment steps, thousand", "env_steps", 0),
        ("updates", "updates", 0),
    ],
    ("cartpole_pg_family", 1): [
        ("`prepare_inputs()`",),
        ("mean advantage of the cut step", "cut", 2),
        ("greedy", "eval/greedy", 0),
        ("sampled", "eval/sampled", 0),
    ],
    ("cartpole_pg_family", 2): [
        ("run",),
        ("`losses/entropy`", "losses/entropy", 6),
        ("greedy", "eval/greedy", 2),
        ("sampled", "eval/sampled", 2),
    ],
    ("cartpole_pg_family", 3): [
        ("estimator",),
        ("mean", "mean", 4),
        ("std over minibatches", "std", 4),
        ("minibatches below 0", "below", 2),
    ],
    ("text_env", 2): [
        ("T, entropy bonus",),
        ("first gradient", "first:losses/grad_norm", 4),
        ("updates", "step", 0),
        ("entropy at the end", "losses/entropy", 3),
        ("characters right", "eval/greedy_right", 0),
    ],
    ("tiny_gpt_rlhf", 1): [
        ("`--dpo_beta`",),
        ("`losses/policy_loss`", "losses/policy_loss", 4),
        ("`dpo/margin`", "dpo/margin", 1),
        ("`dpo/accuracy`", "dpo/accuracy", 1),
        ("`losses/grad_norm`", "losses/grad_norm", 3),
        ("`eval/kl_text` after it", "eval/kl_text", 3),
    ],
    ("tiny_gpt_rlhf", 2): [
        ("scored at",),
        ("`losses/approx_kl`", "losses/approx_kl", 4),
        ("`losses/clipfrac`", "losses/clipfrac", 3),
    ],
    ("policy_gradient_oracle", 1): [("estimator",), ("scale",), ("off",), ("noise",)],
    ("policy_gradient_oracle", 2): [("estimator, step limit",), ("scale",), ("off",), ("noise",)],
    ("policy_gradient_oracle", 3): [("`compute_phi()`",), ("scale",), ("off",), ("noise",)],
}


def table_exercise(exercise: int, columns: list[tuple]):
    def value(some: list[dict], heading: str, name: str = "", digits: int | None = None) -> str:
        if not name:
            return some[0][heading]
        if digits is None:
            return f"{sum(row[name] for row in some)} of {len(some)}"
        return spread(some, name, digits, 1e-3 if "thousand" in heading else 1.0)

    def make(rows: list[dict]) -> str:
        found = groups([row for row in rows if row.get("exercise") == exercise], "line")
        body = [[line, *(value(some, *c) for c in columns[1:])] for (line,), some in found.items()]
        return table([column[0] for column in columns], body)

    return make


TABLES = {f"gallery_{page}": ([page], table_gallery(page)) for page in FAILURES} | {
    f"exercises_{page}_{k}": ([page], table_exercise(k, columns))
    for (page, k), columns in COLUMNS.items()
}
BENCHMARK = Benchmark("exercises", PARTS, TABLES, docs=[f"{page}.md" for page in PARTS])

if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHMARK.main(__doc__)
