"""Every number of docs/text_env.md, measured again.

Run:  python benchmarks/text_env.py             all parts, about 12 minutes on one CPU core
      python benchmarks/text_env.py solve       only these; the other parts' results stay
      python benchmarks/text_env.py --tables    only write the tables of docs anew

Results go to benchmarks/results/text_env.json, tables to the pages of docs and README (between
their `<!-- table NAME -->` marks). Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import math
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

import text_env_pairwise_grpo as te  # noqa: E402

SEEDS = range(300, 320)  # the default flags were chosen on 0 to 19
FORMS = ("pairwise_logistic", "pairwise_linear", "group_norm")
LONG = "--target thequickbrownfoxjumpsoverthelazy"
TARGETS = {
    "hello": "",
    "12345": "--language code",
    "你好世界": "--language chinese --num_trajectories 256",
    "32 letters": LONG,
}
ARTICLE = "--num_trajectories 8 --group_size 4 --learning_rate 1e-3 --entropy_coef 0.01"


def train(line: dict, flags: str, seed: int) -> dict:
    """One run as train() does it, without its log. CPU seconds of the updates and evaluations."""
    args = te.parse_args([*shlex.split(flags), "--quiet", "--seed", str(seed)])
    trainer, sums = te.Trainer(args), {"ratio_deviation": 0.0, "clipfrac": 0.0}
    negative, first = {"k1": 0, "k3": 0}, None
    start = time.process_time()
    while True:
        metrics = trainer.update()
        first = metrics["losses/grad_norm"] if first is None else first
        for name in sums:
            sums[name] += metrics[f"losses/{name}"]
        negative["k1"] += metrics["losses/approx_kl_k1"] < 0
        negative["k3"] += metrics["losses/approx_kl"] < -1e-6  # less is rounding
        if trainer.step % args.eval_every == 0 or trainer.step == args.max_steps:
            result = te.evaluate(trainer.log_probs(), trainer.target)
            enough = args.target_return > 0 and te.solved(result, args.target_return)
            if enough or trainer.step == args.max_steps:
                break
    return line | {
        "seed": seed,
        "solved": te.solved(result, te.threshold(args)),
        **{name[5:]: value for name, value in result.items()},
        "share": result["eval/expected_return"] / len(args.target),
        "greedy": trainer.texts()["greedy"],
        "updates": trainer.step,
        "texts": trainer.step * args.num_trajectories,
        "cpu_seconds": time.process_time() - start,
        "first_grad_norm": first,
        **{name: total / trainer.step for name, total in sums.items()},
        **{f"negative_{name}": count / trainer.step for name, count in negative.items()},
    }


def grid(lines: dict[tuple, str], names: tuple, seeds=SEEDS[:10]) -> list[dict]:
    """All runs of these lines x seeds; a line is named by the values of names."""
    torch.set_num_threads(1)
    jobs = [(key, seed) for key in lines for seed in seeds]
    bar = tqdm(jobs, desc="runs", dynamic_ncols=True)
    return [train(dict(zip(names, key, strict=True)), lines[key], seed) for key, seed in bar]


def sweep(values, flags: str, forms=FORMS, seeds=SEEDS[:10]) -> list[dict]:
    """The 32 letters under a flag's values, for each form; 1,000 updates at most."""
    lines = {
        (value, form): f"{LONG} --max_steps 1000 --adv_estimator {form} {flags.format(value)}"
        for value in values
        for form in forms
    }
    return grid(lines, ("line", "form"), seeds)


def part_solve() -> list[dict]:
    """Four targets, three losses, 20 seeds."""
    lines = {
        (target, form): f"--adv_estimator {form} {flags}"
        for target, flags in TARGETS.items()
        for form in FORMS
    }
    return grid(lines, ("line", "form"), SEEDS)


def part_article() -> list[dict]:
    """The article's settings, and what of them has to change."""
    linear = "--adv_estimator pairwise_linear --temperature 0.2 --max_steps 5000"
    lines = {}
    for target, flags in (("hello", ""), ("12345", "--language code")):
        base = f"{flags} {linear}"
        lines |= {
            (target, "the article's"): f"{base} {ARTICLE} --observation scalar",
            (target, "128 texts an update"): f"{base} --observation scalar --learning_rate 1e-3 "
            "--group_size 4 --entropy_coef 0.01",
            (target, "entropy bonus 0.1"): f"{base} {ARTICLE} --observation scalar "
            "--entropy_coef 0.1",
            (target, "one-hot position"): f"{base} {ARTICLE}",
        }
    return grid(lines, ("target", "line"))


def part_scale() -> list[dict]:
    """Rewards x1, x10, x100, at fixed T and auto."""
    fixed = sweep((1, 10, 100), "--temperature 0.3 --reward_scale {}", FORMS[:2])
    auto = sweep((1, 10, 100), "--reward_scale {}")
    rows = [row | {"temperature": "0.3"} for row in fixed]
    return rows + [row | {"temperature": "auto"} for row in auto]


def part_temperature() -> list[dict]:
    """T from 0.01 to 1, and auto."""
    values = ("0.01", "0.03", "0.1", "0.3", "1", "auto")
    return sweep(values, "--temperature {}", FORMS[:2])


def part_group() -> list[dict]:
    """128 texts an update in groups of 2 to 16."""
    return sweep((2, 4, 8, 16), "--group_size {}")


def part_weight() -> list[dict]:
    """A text's weight: mean or sum of its log-ratios."""
    return sweep(("mean", "sum"), "--trajectory_weight {}", FORMS[:2])


def part_balance() -> list[dict]:
    """What a larger weight or a smaller T does, undone by as large an entropy bonus."""
    lines = {
        ("sum", form, bonus): f"--trajectory_weight sum --adv_estimator {form} --entropy_coef {c}"
        for form in FORMS[:2]
        for bonus, c in (("0.02", 0.02), ("0.64", 0.64))
    }
    for bonus in ("0.02", "0.3"):
        linear = f"--adv_estimator pairwise_linear --temperature 0.1 --entropy_coef {bonus}"
        lines["T 0.1", "pairwise_linear", bonus] = linear
    lines = {key: f"{LONG} --max_steps 1000 {flags}" for key, flags in lines.items()}
    return grid(lines, ("line", "form", "bonus"))


def part_normalize() -> list[dict]:
    """Returns as they are and normalised, at a fixed T."""
    flags = {"as they are": "--no-normalize_returns", "normalised": "--normalize_returns"}
    rows = []
    for name, flag in flags.items():
        rows += [r | {"line": name} for r in sweep([flag], "--temperature 0.3 {}", FORMS[:2])]
    return rows


def part_observation() -> list[dict]:
    """The position as one-hot or as one number."""
    lines = {
        (f"{kind}, entropy bonus {coef}", form): f"--adv_estimator {form} --observation {kind} "
        f"--entropy_coef {coef} --max_steps 1000"
        for kind, coef in (("onehot", 0.02), ("scalar", 0.02), ("scalar", 0.1))
        for form in FORMS
    }
    return grid(lines, ("line", "form"))


def part_language() -> list[dict]:
    """Three alphabets, of 10 to 3,759 characters."""
    lines = {
        (f"{language}, {len(alphabet)}", form): f"--language {language} --adv_estimator {form}"
        for language, (_, alphabet) in te.CHARSETS.items()
        for form in FORMS
    }
    return grid(lines, ("line", "form"))


def part_supervision() -> list[dict]:
    """One advantage a text, or one a character."""
    return sweep(("outcome", "process"), "--supervision {}")


def part_passes() -> list[dict]:
    """Several gradient steps on a batch: ratio, clip, k1 and k3."""
    return sweep((1, 2, 4, 8), "--num_updates_per_batch {}")


def part_entropy() -> list[dict]:
    """Four sizes of the entropy bonus."""
    return sweep((0, 0.01, 0.02, 0.05), "--entropy_coef {}")


def part_hybrid() -> list[dict]:
    """A critic's term beside the group's."""
    return sweep((0, 0.3, 1), "--hybrid_coef {}")


def part_offline() -> list[dict]:
    """1,280 random texts, 200 passes over them, and where the logistic form must end."""
    common = "--max_steps 2000 --entropy_coef 0 --target_return 0"
    pairs = f"{common} --trajectory_weight sum --adv_estimator"
    lines = {
        ("pairwise_logistic", t): f"{pairs} pairwise_logistic --temperature {t}"
        for t in ("1", "0.5", "0.2")
    }
    lines |= {
        ("pairwise_linear", t): f"{pairs} pairwise_linear --temperature {t}" for t in ("1", "0.2")
    }
    lines["group_norm", "-"] = f"{common} --adv_estimator group_norm"
    rows = []
    for seed in SEEDS[:5]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "random.npz")
            flags = f"--learning_rate 0 --max_steps 10 --save_trajectories {path} --quiet"
            te.train(te.parse_args([*flags.split(), "--seed", str(seed), "--output_dir", folder]))
            best = float(te.load_trajectories(str(path))["rewards"].sum(axis=1).max())
            for (form, t), flags in lines.items():
                row = train({"form": form, "temperature": t}, f"{flags} --offline {path}", seed)
                rows.append(row | {"best_in_file": best})
    return sorted(rows, key=lambda row: list(lines).index((row["form"], row["temperature"])))


def bare_seconds(trainer: te.Trainer, updates: int) -> float:
    """CPU of the bare work: the same draws and passes of the network, one loss, no metrics."""
    args, table_, target = trainer.args, trainer.positions, trainer.target
    actor = te.mlp(table_.shape[1], args.hidden_size, len(args.charset), 0.01)
    optimizer = torch.optim.Adam(actor.parameters(), fused=True)
    rows, number = torch.arange(len(table_)), args.num_trajectories
    start = time.process_time()
    for _ in range(updates):
        with torch.no_grad():
            probs = actor(table_).softmax(dim=1)
            actions = torch.multinomial(probs, number, replacement=True).T
            returns = (actions == target).float().sum(dim=1)
        logp = actor(table_).log_softmax(dim=1)[rows, actions].sum(dim=1)
        loss = -(logp * (returns - returns.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        optimizer.step()
    return time.process_time() - start


def part_overhead() -> list[dict]:
    """A run's updates beside the bare work of the same size, in turn."""
    torch.set_num_threads(1)
    rows = []
    for line, flags in (("hello", ""), ("你好世界", TARGETS["你好世界"]), ("32 letters", LONG)):
        for form in FORMS:
            for repeat in range(5):
                flags_ = f"{flags} --adv_estimator {form} --quiet --seed {repeat}"
                trainer = te.Trainer(te.parse_args(shlex.split(flags_)))
                trainer.update()
                bare = bare_seconds(trainer, 300)
                start = time.process_time()
                for _ in range(300):
                    trainer.update()
                ours = time.process_time() - start
                rows.append({"line": line, "form": form, "bare": bare / 0.3, "ours": ours / 0.3})
    return rows


def part_startup() -> list[dict]:
    """CPU seconds from nothing to the end of the first update, beside torch and its optimiser."""
    torch_only = "import torch; torch.optim.Adam([torch.zeros(1, requires_grad=True)])"
    ours = "import text_env_pairwise_grpo as te; te.Trainer(te.parse_args(['--quiet'])).update()"
    whole = "import text_env_pairwise_grpo as te; te.main(['--quiet', '--output_dir', '{}'])"
    timed = "\nimport time; print(time.process_time())"
    rows = []
    for _ in range(5):
        row = {}
        for name, code in (("torch", torch_only), ("ours", ours), ("whole", whole)):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-c", code.format(folder) + timed]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            row[name] = float(done.stdout)
        rows.append(row)
    return rows


PARTS = {name[5:]: part for name, part in list(globals().items()) if name.startswith("part_")}


# ---- tables: medians, with (lowest-highest) of the seeds -----------------------------------------


def solved(rows: list[dict]) -> str:
    return f"{sum(row['solved'] for row in rows)} of {len(rows)}"


def table_solve(rows: list[dict]) -> str:
    header = ["target", "form", "solved", "updates", "texts, thousand", "CPU, s", "exact match"]
    body = [
        [target, form, solved(some), spread(some, "updates", 0), spread(some, "texts", 1, 1e-3)]
        + [spread(some, "cpu_seconds", 2), spread(some, "match_probability", 2)]
        for (target, form), some in groups(rows, "line", "form").items()
    ]
    return table(header, body)


def table_article(rows: list[dict]) -> str:
    body = [
        [target, line, solved(some), spread(some, "updates", 0), spread(some, "greedy_right", 0)]
        + [spread(some, "share", 2), ", ".join(dict.fromkeys(row["greedy"] for row in some))]
        for (target, line), some in groups(rows, "target", "line").items()
    ]
    header = ["target", "settings", "solved", "updates", "characters right"]
    return table([*header, "return / highest", "greedy texts"], body)


def table_lines(head: str):
    def make(rows: list[dict]) -> str:
        header = [head, "form", "solved", "updates", "characters right", "return / highest"]
        body = [
            [str(line), form, solved(some), spread(some, "updates", 0)]
            + [spread(some, "greedy_right", 0), spread(some, "share", 2)]
            for (line, form), some in groups(rows, "line", "form").items()
        ]
        return table(header, body)

    return make


def table_balance(rows: list[dict]) -> str:
    header = ["", "form", "entropy bonus", "solved", "updates", "characters right"]
    body = [
        [line, form, bonus, solved(some), spread(some, "updates", 0)]
        + [spread(some, "greedy_right", 0)]
        for (line, form, bonus), some in groups(rows, "line", "form", "bonus").items()
    ]
    return table(header, body)


def table_scale(rows: list[dict]) -> str:
    header = ["form", "T", "rewards", "first gradient", "against x1", "solved", "updates"]
    body, found = [], groups(rows, "form", "temperature", "line")
    for (form, t, scale), some in found.items():
        norm, one = (
            statistics.median(row["first_grad_norm"] for row in group)
            for group in (some, found[form, t, 1])
        )
        shown = "-" if form == "group_norm" else t
        body.append([form, shown, f"x{scale}", f"{norm:.3f}", f"{norm / one:.2f}", solved(some)])
        body[-1].append(spread(some, "updates", 0))
    return table(header, sorted(body, key=lambda row: (FORMS.index(row[0]), row[1] == "auto")))


def table_passes(rows: list[dict]) -> str:
    header = ["gradient steps a batch", "form", "solved", "updates", "mean abs(ratio - 1)"]
    header += ["ratio beyond 0.2", "k1 < 0, updates", "k3 < 0"]
    body = [
        [str(line), form, solved(some), spread(some, "updates", 0)]
        + [spread(some, "ratio_deviation", 3), spread(some, "clipfrac", 2)]
        + [spread(some, "negative_k1", 2), spread(some, "negative_k3", 2)]
        for (line, form), some in groups(rows, "line", "form").items()
    ]
    return table(header, body)


def table_offline(rows: list[dict]) -> str:
    header = ["form", "T", "characters right", "p of a right one", "predicted", "best text in file"]
    body = []
    for (form, t), some in groups(rows, "form", "temperature").items():
        # the stationary point of the logistic form: pi = pi_old * exp(R / T) / Z
        odds = math.exp(1.1 / float(t)) if form == "pairwise_logistic" else math.nan
        predicted = f"{odds / (odds + 25):.3f}" if form == "pairwise_logistic" else "-"
        p = [{"p": (row["share"] + 0.1) / 1.1} for row in some]
        body.append([form, t, spread(some, "greedy_right", 0), spread(p, "p", 3), predicted])
        body[-1].append(spread(some, "best_in_file", 1))
    return table(header, body)


def table_overhead(rows: list[dict]) -> str:
    body = []
    for (line, form), some in groups(rows, "line", "form").items():
        ratio = [{"ratio": row["ours"] / row["bare"]} for row in some]
        body.append([line, form, spread(some, "bare", 2), spread(some, "ours", 2)])
        body[-1].append(spread(ratio, "ratio", 2))
    header = ["target", "form", "bare work, ms an update", "script, ms an update", "ratio"]
    return table(header, body)


def table_startup(rows: list[dict]) -> str:
    ratio = [{"ratio": row["ours"] / row["torch"]} for row in rows]
    body = [[spread(rows, "torch", 2), spread(rows, "ours", 2), spread(ratio, "ratio", 2)]]
    body[0].append(spread(rows, "whole", 2))
    header = ["torch and an optimiser, s", "script to its first update, s", "ratio"]
    return table([*header, "whole default run, s"], body)


TABLES = {
    "text_solve": (["solve"], table_solve),
    "text_article": (["article"], table_article),
    "text_scale": (["scale"], table_scale),
    "text_temperature": (["temperature"], table_lines("T")),
    "text_group": (["group"], table_lines("group size")),
    "text_weight": (["weight"], table_lines("trajectory weight")),
    "text_balance": (["balance"], table_balance),
    "text_normalize": (["normalize"], table_lines("returns")),
    "text_observation": (["observation"], table_lines("observation")),
    "text_language": (["language"], table_lines("alphabet")),
    "text_supervision": (["supervision"], table_lines("supervision")),
    "text_passes": (["passes"], table_passes),
    "text_entropy": (["entropy"], table_lines("entropy bonus")),
    "text_hybrid": (["hybrid"], table_lines("hybrid_coef")),
    "text_offline": (["offline"], table_offline),
    "text_overhead": (["overhead"], table_overhead),
    "text_startup": (["startup"], table_startup),
}
BENCHMARK = Benchmark("text_env", PARTS, TABLES, ["text_env.md"])

if __name__ == "__main__":
    BENCHMARK.main(__doc__)
