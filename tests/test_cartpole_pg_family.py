"""cartpole_pg_family.py: formulas twice, identities, rollout beside gymnasium, runs, learning."""

import argparse
import copy
import json
import math
import signal
import statistics
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats

import cartpole_pg_family as cp
from conftest import (
    bad_files,
    break_with_nan,
    check_full_disk,
    check_kill_while_saving,
    check_refused,
    check_resume,
    check_second_interrupt,
    check_unwritable,
    close,
    events_of,
    golden,
    interrupt_at,
    interrupt_first_evaluation,
    metrics,
    same,
    state,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date")

CPU = torch.device("cpu")
ESTIMATORS = list(cp.PHI)
WITH_V = ["gae", "nstep", "actor_critic", "ppo"]
V0 = ["--env_id", "CartPole-v0"]


def make_args(estimator: str, *flags: str) -> argparse.Namespace:
    return cp.parse_args(["--threads", "1", "--adv_estimator", estimator, *flags, "--quiet"])


def make_trainer(estimator: str, *flags: str) -> cp.Trainer:
    return cp.Trainer(make_args(estimator, "--eval_episodes", "2", *flags))


def ragged(num=7, length=11, seed=0) -> tuple:
    """Random (N, T) data with ends in the middle: rewards, values, next_values, ends."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.tensor(rng.normal(size=shape))  # noqa: E731
    terminated = torch.tensor(rng.random((num, length)) < 0.15)
    truncated = torch.tensor(rng.random((num, length)) < 0.15) & ~terminated
    terminated[:4], truncated[:4] = False, False
    truncated[0, -1] = truncated[1, 3] = terminated[2, 4] = True  # row 3 never ends
    values = draw(num, length)
    following = torch.cat([values[:, 1:], draw(num, 1)], dim=1)
    next_values = torch.where(terminated | truncated, draw(num, length), following)
    return draw(num, length), values, next_values, terminated, truncated


def episodes(num=8, length=9, seed=0) -> tuple[cp.Batch, torch.Tensor]:
    """Whole episodes of different lengths, fallen or out of time, and V (N, T + 1), float64."""
    rng = np.random.default_rng(seed)
    lengths = torch.tensor([length, length, 1, 1, *rng.integers(1, length + 1, num - 4)])
    mask = torch.arange(length) < lengths[:, None]
    last = torch.arange(length) == lengths[:, None] - 1
    late = torch.arange(num)[:, None] % 2 == 0
    draw = lambda *shape: torch.tensor(rng.normal(size=shape))  # noqa: E731
    observations, rewards = draw(num, length + 1, 4), draw(num, length) * mask
    ends = last & ~late, last & late
    actions = torch.tensor(rng.integers(2, size=(num, length)))
    batch = cp.Batch(observations, actions, draw(num, length), rewards, *ends, mask)
    return batch, draw(num, length + 1)


def monte_carlo(batch: cp.Batch, values: torch.Tensor, gamma: float) -> torch.Tensor:
    """(N, T) what came after each step in its episode, V where time was up; masked: NaN."""
    result = torch.full_like(batch.rewards, math.nan)
    for n, t in batch.mask.nonzero().tolist():
        total, weight = 0.0, 1.0
        for k in range(t, batch.mask.shape[1]):
            total += weight * batch.rewards[n, k].item()
            weight *= gamma
            if batch.terminated[n, k] or batch.truncated[n, k]:
                break
        if not batch.terminated[n, k]:
            total += weight * values[n, k + 1].item()
        result[n, t] = total
    return result


# ---- 1  the maths, each formula against a transcription in loops ---------------------------------


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_vanilla_and_reinforce_in_loops(gamma):
    rewards = episodes()[0].rewards
    vanilla, reinforce = cp.compute_vanilla(rewards, gamma), cp.compute_reinforce(rewards, gamma)
    assert vanilla.shape == reinforce.shape == rewards.shape
    for n, row in enumerate(rewards.tolist()):
        total = sum(gamma**t * r for t, r in enumerate(row))
        for t in range(len(row)):
            assert vanilla[n, t].item() == pytest.approx(total, abs=1e-6)  # float32 powers
            after = sum(gamma**k * r for k, r in enumerate(row[t:]))
            assert reinforce[n, t].item() == pytest.approx(after, abs=1e-12)


@pytest.mark.parametrize("kind", ["value", "trajectory_mean", "batch_time_mean"])
def test_baseline_in_loops(kind):
    batch, values = episodes()
    mask = batch.mask
    returns = torch.where(mask, values[:, 1:] ** 2, 1e6)  # padding must not count
    ours = cp.compute_baseline(returns, values[:, :-1], mask, kind)
    for n, t in mask.nonzero().tolist():
        b = {
            "value": values[n, t].item(),
            "trajectory_mean": statistics.mean(returns[n, mask[n]].tolist()),
            "batch_time_mean": statistics.mean(returns[mask[:, t], t].tolist()),
        }[kind]
        assert ours[n, t].item() == pytest.approx(returns[n, t].item() - b, abs=1e-12)


def test_td_in_loops():
    rewards, values, next_values, terminated, _ = ragged()
    ours = cp.compute_td(rewards, values, next_values, terminated, 0.9)
    for n in range(rewards.shape[0]):
        for t in range(rewards.shape[1]):
            target = rewards[n, t].item()
            if not terminated[n, t]:
                target += 0.9 * next_values[n, t].item()
            assert ours[n, t].item() == pytest.approx(target - values[n, t].item(), abs=1e-12)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("n_steps", [1, 2, 5, 11, 50])
def test_nstep_in_loops(n_steps, gamma):
    """n rewards, fewer where the episode or the batch ends, then V, except after a fall."""
    rewards, values, next_values, *ends = ragged()
    terminated, truncated = ends
    ours = cp.compute_nstep(rewards, values, next_values, *ends, gamma, n_steps)
    for n in range(rewards.shape[0]):
        for t in range(rewards.shape[1]):
            total = 0.0
            for k in range(t, min(t + n_steps, rewards.shape[1])):
                total += gamma ** (k - t) * rewards[n, k].item()
                if terminated[n, k] or truncated[n, k]:
                    break
            if not terminated[n, k]:
                total += gamma ** (k - t + 1) * next_values[n, k].item()
            assert ours[n, t].item() == pytest.approx(total - values[n, t].item(), abs=1e-6)


@pytest.mark.parametrize("gamma,lam", [(0.9, 0.95), (1.0, 0.5), (0.9, 1.0)])
def test_gae_in_loops(gamma, lam):
    rewards, values, next_values, *ends = ragged()
    delta = cp.compute_td(rewards, values, next_values, ends[0], gamma)
    ours = cp.compute_gae(rewards, values, next_values, *ends, gamma, lam)
    for n in range(rewards.shape[0]):
        for t in range(rewards.shape[1]):
            total = 0.0
            for k in range(t, rewards.shape[1]):
                total += (gamma * lam) ** (k - t) * delta[n, k].item()
                if ends[0][n, k] or ends[1][n, k]:
                    break
            assert ours[n, t].item() == pytest.approx(total, abs=1e-12)


def golden_rows(case: dict, n: int) -> tuple[cp.Batch, torch.Tensor, list[int]]:
    """Environment n of a golden case as the script lays it out: after an end, a row that resets."""
    column = lambda name: [row[n] for row in case[name]]  # noqa: E731
    data = map(column, ("rewards", "values", "terminations", "truncations", "final_obs_values"))
    rows, values, kept = [], [], []
    for reward, value, terminated, truncated, final in zip(*data, strict=True):
        kept.append(len(rows))
        rows.append((reward, bool(terminated), bool(truncated), True))
        values.append(value)
        if terminated or truncated:
            rows.append((0.0, False, False, False))
            values.append(final)
    values.append(case["last_value"][n])
    if not rows[-1][3]:  # the last step was an end: its V is the last, and no row follows
        rows.pop()
        values.pop()
    rewards, *rest = (torch.tensor([x]) for x in zip(*rows, strict=True))
    nothing = torch.zeros(1, len(rows))
    batch = cp.Batch(nothing, nothing, nothing, rewards.double(), *rest)
    return batch, torch.tensor([values], dtype=torch.float64), kept


@pytest.mark.parametrize("case", golden("gae")["cases"])
def test_gae_golden(case):
    args = make_args("gae")
    args.gamma, args.lam = case["gamma"], case["gae_lambda"]
    theirs = case["truncation_bootstrap"]
    for n in range(case["N"]):
        batch, values, kept = golden_rows(case, n)
        advantages, returns = cp.prepare_inputs(args, batch, values)
        for name, ours in ("advantages", advantages), ("returns", returns):
            exact = torch.tensor([row[n] for row in theirs[f"ref64_{name}"]], dtype=torch.float64)
            close(ours[0, kept], exact)
            sb3 = torch.tensor([row[n] for row in theirs[f"sb3_{name}"]], dtype=torch.float64)
            close(ours[0, kept], sb3, 1e-5)


# ---- 2  identities between the estimators --------------------------------------------------------


def test_one_step_limits_are_the_td_error():
    rewards, values, next_values, *ends = ragged()
    td = cp.compute_td(rewards, values, next_values, ends[0], 0.9)
    close(cp.compute_nstep(rewards, values, next_values, *ends, 0.9, 1), td)
    close(cp.compute_gae(rewards, values, next_values, *ends, 0.9, 0.0), td)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_long_limits_are_monte_carlo(gamma):
    """nstep n >= T == gae lambda 1 == baseline value == returns (V where time was up) - V."""
    batch, values = episodes()
    returns = monte_carlo(batch, values, gamma)
    expected = (returns - values[:, :-1])[batch.mask]
    for estimator in ("nstep", "gae", "ppo", "baseline"):
        args = make_args(estimator, "--gamma", str(gamma))
        args.n_steps, args.lam = 9, 1.0
        advantages, target = cp.prepare_inputs(args, batch, values)
        close(advantages[batch.mask], expected, 1e-6)
        close(target[batch.mask], returns[batch.mask], 1e-6)
    args = make_args("reinforce", "--gamma", str(gamma))
    returns = monte_carlo(batch, torch.zeros_like(values), gamma)  # without V, nothing follows
    assert cp.prepare_inputs(args, batch, None)[1] is None
    close(cp.prepare_inputs(args, batch, None)[0][batch.mask], returns[batch.mask])
    vanilla = cp.prepare_inputs(make_args("vanilla", "--gamma", str(gamma)), batch, None)[0]
    close(vanilla, returns[:, :1].expand_as(vanilla), 1e-6)
    for kind in ("trajectory_mean", "batch_time_mean"):
        args = make_args("baseline", "--gamma", str(gamma), "--baseline", kind)
        advantages, target = cp.prepare_inputs(args, batch, None)
        filled = returns.nan_to_num()
        expected = cp.compute_baseline(filled, filled, batch.mask, kind)
        close(advantages[batch.mask], expected[batch.mask])
        assert target is None and not cp.has_critic(args)


def test_group_scores_in_loops():
    batch, _ = episodes(12)
    batch.rewards[4:8] = batch.rewards[4]  # a flat group
    args = make_args("grpo", "--gamma", "0.9", "--num_envs", "12", "--group_size", "4")
    advantages, target = cp.prepare_inputs(args, batch, None)
    assert target is None
    scores = [sum(0.9**t * r for t, r in enumerate(row)) for row in batch.rewards.tolist()]
    for n, score in enumerate(scores):
        group = scores[n // 4 * 4 : n // 4 * 4 + 4]
        expected = (score - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
        close(advantages[n], torch.full_like(advantages[n], 0.0 if 4 <= n < 8 else expected), 1e-5)


@pytest.mark.parametrize("estimator", WITH_V)
def test_advantages_of_a_real_batch_in_loops(estimator):
    """Rows that reset are in the middle of the data, and reach nothing."""
    flags = ["--num_envs", "8", "--num_steps", "64", "--gamma", "0.9"]
    flags += {"nstep": ["--n_steps", "5"], "actor_critic": []}.get(estimator, ["--lam", "0.95"])
    trainer = make_trainer(estimator, *flags)
    batch = cp.sample_batch(trainer)
    values = torch.randn(8, 65, dtype=torch.float64)
    batch.rewards = batch.rewards.double()
    advantages, target = cp.prepare_inputs(trainer.args, batch, values)
    assert (~batch.mask).sum() > 8 and batch.terminated.any()
    lam = {"actor_critic": 0.0, "nstep": 1.0}.get(estimator, 0.95)
    reach = 5 if estimator == "nstep" else 64
    for n, t in batch.mask.nonzero().tolist():
        total = 0.0
        for k in range(t, min(t + reach, 64)):
            assert batch.mask[n, k]
            bootstrap = 0.0 if batch.terminated[n, k] else 0.9 * values[n, k + 1].item()
            delta = batch.rewards[n, k].item() + bootstrap - values[n, k].item()
            total += (0.9 * lam) ** (k - t) * delta
            if batch.terminated[n, k]:
                break
        assert advantages[n, t].item() == pytest.approx(total, abs=1e-6)
        assert target[n, t].item() == pytest.approx(total + values[n, t].item(), abs=1e-6)


def weights(trainer: cp.Trainer) -> torch.Tensor:
    networks = [trainer.parts[name] for name in ("actor", "critic") if name in trainer.parts]
    return torch.cat([p.detach().flatten() for net in networks for p in net.parameters()])


def test_one_step_of_nstep_is_actor_critic():
    rates = ["--actor_learning_rate", "1e-3", "--critic_learning_rate", "2e-3", "--num_envs", "4"]
    rates += ["--gamma", "0.97", "--num_steps", "1"]
    one = make_trainer("nstep", *rates, "--n_steps", "1")
    two = make_trainer("actor_critic", *rates)
    for _ in range(60):
        one.update()
        two.update()
    assert one.env_steps == two.env_steps < 240 and torch.equal(weights(one), weights(two))


def test_ppo_without_its_clip_and_passes_is_gae():
    flags = ["--num_envs", "6", "--num_steps", "16", "--critic_learning_rate", "2e-3"]
    flags += ["--actor_learning_rate", "1e-3", "--entropy_coef", "0.01", "--lam", "0.9"]
    flags += ["--gamma", "0.97"]
    plain = ["--update_epochs", "1", "--minibatch_size", "0", "--clip_epsilon", "inf"]
    one = make_trainer("ppo", *flags, *plain, "--normalize_advantages", "none")
    two = make_trainer("gae", *flags)
    start = weights(one)
    for _ in range(8):
        one.update()
        two.update()
    close(weights(one), weights(two), 2e-6)
    assert (weights(one) - start).abs().max() > 5e-3


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_one_pass_of_grpo_is_reinforce_with_the_groups_baseline(gamma):
    flags = ["--num_envs", "12", "--group_size", "4", "--max_grad_norm", "inf"]
    flags += ["--update_epochs", "1", "--minibatch_size", "0", "--normalize_advantages", "none"]
    trainer = make_trainer("grpo", *flags, "--gamma", str(gamma))
    batch = cp.sample_batch(trainer)
    loss, scores = 0.0, []
    for row in batch.rewards.tolist():
        scores.append(sum(gamma**t * r for t, r in enumerate(row)))
    for n, t in batch.mask.nonzero().tolist():
        group = scores[n // 4 * 4 : n // 4 * 4 + 4]
        phi = (scores[n] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
        log_probs = trainer.actor(batch.observations[n, t][None])[0].log_softmax(dim=0)
        loss = loss - phi * log_probs[batch.actions[n, t]] / batch.mask.sum()
    loss.backward()
    expected = [p.grad.clone() for p in trainer.actor.parameters()]
    cp.update_model(trainer, batch, *cp.prepare_inputs(trainer.args, batch, None))
    for p, theirs in zip(trainer.actor.parameters(), expected, strict=True):
        close(p.grad, theirs, 1e-5)


@pytest.mark.parametrize("estimator", cp.CLIPPED)
def test_the_ratio_is_one_in_the_first_pass_only(estimator):
    rate = ["--actor_learning_rate", "1e-2"]
    once = make_trainer(estimator, *rate, "--update_epochs", "1", "--minibatch_size", "0")
    once.update()
    once.train_seconds = more_seconds = 1.0
    row = once.row()
    assert row["losses/clipfrac"] == 0
    assert row["losses/approx_kl"] == pytest.approx(0, abs=1e-7)
    more = make_trainer(estimator, *rate, "--update_epochs", "8", "--minibatch_size", "0")
    more.update()
    more.train_seconds = more_seconds
    row = more.row()
    assert row["losses/clipfrac"] > 0 and row["losses/approx_kl"] > 1e-3


# ---- 3  the update -------------------------------------------------------------------------------


def transcription(trainer, batch, advantages, returns) -> dict[str, float]:
    """update_model on copies of the networks, a row at a time, SGD with rate 0.1. Sums: metrics."""
    args, seen = trainer.args, []
    rows = batch.mask.nonzero().tolist()
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    if args.normalize_advantages == "batch":
        kept = [advantages[n, t].item() for n, t in rows]
        advantages = (advantages - statistics.mean(kept)) / (statistics.stdev(kept) + 1e-8)
    for _ in range(args.update_epochs or 1):
        order, passed = torch.randperm(len(rows), generator=generator).tolist(), []
        size = args.minibatch_size or len(rows)
        for first in range(0, len(rows), size):
            part = [rows[i] for i in order[first : first + size]]
            phis = [advantages[n, t].item() for n, t in part]
            if args.normalize_advantages == "minibatch":
                mean, std = statistics.mean(phis), statistics.stdev(phis) if phis[1:] else 1.0
                phis = [(phi - mean) / (std + 1e-8) for phi in phis]
            names = "objective", "entropy", "approx_kl", "clipfrac", "value_loss"
            one: dict = dict.fromkeys(names, 0.0)
            for (n, t), phi in zip(part, phis, strict=True):
                observation = batch.observations[n, t]
                probs = trainer.actor(observation[None])[0].softmax(dim=0)
                logp = probs[batch.actions[n, t]].log()
                one["entropy"] -= sum(p * p.log() for p in probs) / len(part)
                ratio = (logp - batch.logp_old[n, t]).exp()
                if args.adv_estimator in ("ppo", "grpo"):
                    low, high = (torch.tensor(1 + e).double() for e in (-0.2, 0.2))
                    clipped = min(max(ratio, low), high)
                    one["objective"] += min(ratio * phi, clipped * phi) / len(part)
                else:
                    one["objective"] += logp * phi / len(part)
                one["approx_kl"] += (ratio - 1 - ratio.log()).item() / len(part)
                one["clipfrac"] += float(not 1 - 0.2 <= ratio <= 1 + 0.2) / len(part)
                if returns is not None:
                    value = trainer.critic(observation[None])[0, 0]
                    one["value_loss"] += 0.5 * (value - returns[n, t]) ** 2 / len(part)
            passed.append(one["approx_kl"])
            loss = -one["objective"] - args.entropy_coef * one["entropy"] + one["value_loss"]
            one["policy_loss"] = -one.pop("objective")
            networks = [trainer.actor] + ([trainer.critic] if returns is not None else [])
            for net in networks:
                grads = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
                norm = math.sqrt(sum(g.square().sum().item() for g in grads))
                one.setdefault("grad_norm", norm)
                for p, g in zip(net.parameters(), grads, strict=True):
                    p.data -= 0.1 * g * min(1.0, args.max_grad_norm / norm)
            seen.append({name: torch.as_tensor(value).item() for name, value in one.items()})
        if args.target_kl and statistics.mean(passed) > args.target_kl:
            break
    return {name: sum(one[name] for one in seen) for name in seen[0]} | {"steps": len(seen)}


UPDATES = [
    ("ppo", ["--minibatch_size", "30", "--update_epochs", "2", "--normalize_advantages", "batch"]),
    ("ppo", ["--minibatch_size", "41", "--normalize_advantages", "minibatch"]),
    ("ppo", ["--minibatch_size", "0", "--update_epochs", "2", "--normalize_advantages", "none"]),
    ("grpo", ["--minibatch_size", "50", "--update_epochs", "2"]),
    ("grpo", ["--update_epochs", "2", "--normalize_advantages", "minibatch"]),
    ("gae", []),
    ("gae", ["--normalize_advantages", "batch"]),
    ("nstep", ["--normalize_advantages", "minibatch"]),
    ("baseline", []),
    ("vanilla", ["--normalize_advantages", "batch"]),
    ("reinforce", []),
]


def double_batch(trainer: cp.Trainer, noise=0.3) -> tuple:
    """A float64 batch of the trainer with 0 < ratio != 1, and random Phi_t and targets."""
    batch = cp.sample_batch(trainer)
    for net in (trainer.parts[name] for name in trainer.parts if name != "optimizer"):
        net.double()
        for p in net.parameters():  # away from the uniform policy
            p.data += 0.1 * torch.randn_like(p)
    batch.observations, shape = batch.observations.double(), batch.mask.shape
    log_probs = trainer.actor(batch.observations[:, :-1]).log_softmax(dim=2).detach()
    batch.logp_old = log_probs.gather(2, batch.actions[..., None]).squeeze(2)
    batch.logp_old += noise * torch.randn(shape, dtype=torch.float64)
    advantages = 0.3 + torch.randn(shape, dtype=torch.float64)
    returns = torch.randn(shape, dtype=torch.float64) if cp.has_critic(trainer.args) else None
    return batch, advantages, returns


def sgd(trainer: cp.Trainer, rate=0.1) -> list:
    """Plain gradient steps in place of Adam's. Returns a list that grows with every step."""
    names, taken = [n for n in ("actor", "critic") if n in trainer.parts], []
    groups = [{"params": trainer.parts[n].parameters(), "rate": rate} for n in names]
    trainer.optimizer = torch.optim.SGD(groups, lr=rate)
    trainer.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    return taken


@pytest.mark.parametrize("clip_norm", ["0.2", "inf"])
@pytest.mark.parametrize("estimator,flags", UPDATES)
def test_update_in_loops_where_the_clip_acts(estimator, flags, clip_norm):
    some = {"grpo": ["--group_size", "4"], "ppo": ["--clip_epsilon", "0.2"]}.get(estimator, [])
    some += ["--num_steps", "16"] if estimator in WITH_V else []
    trainer = make_trainer(estimator, "--num_envs", "8", *some, *flags, "--entropy_coef", "0.3")
    trainer.args.max_grad_norm = float(clip_norm)
    batch, advantages, returns = double_batch(trainer)
    if estimator not in WITH_V:  # short enough for a loop
        batch.mask[:, 30:] = False
    ours = copy.copy(trainer)
    ours.actor = copy.deepcopy(trainer.actor)
    ours.parts = {"actor": ours.actor}
    if returns is not None:
        ours.parts["critic"] = ours.critic = copy.deepcopy(trainer.critic)
    ours.generator = torch.Generator()
    ours.generator.set_state(trainer.generator.get_state())
    taken, before = sgd(ours), weights(ours)
    cp.update_model(ours, batch, advantages, returns)
    expected = transcription(trainer, batch, advantages, returns)
    close(weights(ours), weights(trainer), 2e-7)
    assert (weights(ours) - before).abs().max() > 1e-3
    row = {name[7:]: total for name, (total, number) in ours.sums.items() if number == len(taken)}
    assert expected.pop("steps") == len(taken) and len(row) == len(ours.sums)
    if estimator not in cp.CLIPPED:
        expected.pop("approx_kl"), expected.pop("clipfrac")
    else:
        assert 0.1 < expected["clipfrac"] / len(taken) < 0.9
    if returns is None:
        expected.pop("value_loss")
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_passes_stop_once_the_policy_moved_far():
    flags = ["--num_envs", "4", "--update_epochs", "10", "--minibatch_size", "50"]
    for limit in ("0", "1e9", "1e-9"):
        trainer = make_trainer("ppo", *flags, "--target_kl", limit)
        batch, advantages, returns = double_batch(trainer, 0.0)
        taken = sgd(trainer, 0.5)
        cp.update_model(trainer, batch, advantages, returns)
        rows = int(batch.mask.sum())
        per_pass = math.ceil(rows / 50)
        assert len(taken) % per_pass == 0  # a pass that was begun is finished
        if limit in ("0", "1e9"):
            assert len(taken) == 10 * per_pass
        if limit == "1e-9":
            assert len(taken) == per_pass


def test_masked_rows_reach_no_gradient_and_all_others_do():
    flags = ["--num_envs", "8", "--num_steps", "40", "--normalize_advantages", "batch"]
    results = []
    for junk in (False, True):
        trainer = make_trainer("gae", *flags)
        batch = cp.sample_batch(trainer)
        torch.manual_seed(3)
        advantages, returns = torch.randn(8, 40), torch.randn(8, 40)
        out = ~batch.mask
        assert out.sum() >= 8
        if junk:
            batch.observations[:, :-1][out] = 1e3
            batch.actions[out] = 1 - batch.actions[out]
            batch.logp_old[out] = batch.rewards[out] = 50.0
            advantages[out], returns[out] = 1e4, -1e4
        used = {"actor": 0, "critic": 0}
        for name in used:

            def count(_, inputs, name=name, used=used):
                used[name] += len(inputs[0])

            trainer.parts[name].register_forward_pre_hook(count)
        cp.update_model(trainer, batch, advantages, returns)
        assert used == dict.fromkeys(used, int(batch.mask.sum()))
        results.append(weights(trainer))
    assert torch.equal(*results)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_update_counts_what_it_has_used(estimator, monkeypatch):
    trainer, used, real = make_trainer(estimator, "--num_envs", "16"), [], cp.update_model
    monkeypatch.setattr(cp, "update_model", lambda t, b, *x: used.append(b) or real(t, b, *x))
    rounds = 30 if trainer.args.num_steps else 5
    for _ in range(rounds):
        trainer.update()
    assert trainer.env_steps == sum(int(b.mask.sum()) for b in used) and trainer.updates == rounds
    assert any((~b.mask).any() for b in used)


def test_each_network_has_its_own_rate_and_clip():
    flags = ["--actor_learning_rate", "0.004", "--critic_learning_rate", "0.002"]
    trainer = make_trainer("gae", *flags, "--max_grad_norm", "0.001")
    before = [copy.deepcopy([*net.parameters()]) for net in (trainer.actor, trainer.critic)]
    trainer.update()
    assert trainer.sums["losses/grad_norm"][0] > 0.002
    pairs = zip((trainer.actor, trainer.critic), before, (0.004, 0.002), strict=True)
    for net, old, rate in pairs:
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
        assert norm == pytest.approx(0.001, rel=1e-3)
        step = max((p - q).abs().max().item() for p, q in zip(net.parameters(), old, strict=True))
        assert step == pytest.approx(rate, rel=0.1)  # Adam's first step is the learning rate


def test_annealing_reaches_both_rates():
    flags = ["--num_envs", "4", "--max_steps", "100", "--num_steps", "8"]
    flags += ["--actor_learning_rate", "1e-2", "--critic_learning_rate", "3e-3"]
    for anneal in (True, False):
        trainer = make_trainer("gae", *flags, *["--anneal"] * anneal)
        for _ in range(3):
            done = trainer.env_steps
            trainer.update()
            rates = [group["lr"] for group in trainer.optimizer.param_groups]
            left = 1 - done / 100 if anneal else 1.0
            assert rates == pytest.approx([1e-2 * left, 3e-3 * left])
        trainer.train_seconds = 1.0
        assert trainer.row()["charts/learning_rate"] == rates[0]
    trainer.args.anneal, trainer.env_steps = True, 105
    trainer.update()
    assert trainer.optimizer.param_groups[0]["lr"] == 0  # not below


# ---- 4  rollout ----------------------------------------------------------------------------------


def controller(observations: torch.Tensor, gain=1e3) -> torch.Tensor:
    """Logits that push to where the pole falls: it stays up for hundreds of steps."""
    lean = gain * (observations[..., 2] + observations[..., 3])
    return torch.stack([-lean, lean], dim=-1)


def mixed(observations: torch.Tensor) -> torch.Tensor:
    """The controller in every other environment, chance in the rest."""
    return controller(observations) * (torch.arange(len(observations)) % 2)[:, None]


def watch(trainer: cp.Trainer) -> list[np.ndarray]:
    """A list that gets the environments' own state (4, N), float64, before every step."""
    states, step = [], trainer.envs.step

    def spy(actions):
        states.append(np.array(trainer.envs.state))
        return step(actions)

    trainer.envs.step = spy
    return states


def replay(env, start: np.ndarray, actions: list[int]) -> tuple:
    """The episode of gymnasium's own environment: observations, ends, rewards."""
    env.reset()
    env.unwrapped.state = start.copy()
    rows = []
    for action in actions:
        rows.append(env.step(action))
        if rows[-1][2] or rows[-1][3]:
            break
    observations, rewards, terminated, truncated, _ = zip(*rows, strict=True)
    return np.stack(observations), [*rewards], [*terminated], [*truncated]


ROLLOUTS = [
    ("gae", "CartPole-v1", ["--num_envs", "210", "--num_steps", "60"], None),
    ("ppo", "CartPole-v0", ["--num_envs", "8", "--num_steps", "450"], mixed),
    ("reinforce", "CartPole-v1", ["--num_envs", "210"], None),
    ("baseline", "CartPole-v0", ["--num_envs", "12"], mixed),
    ("grpo", "CartPole-v0", ["--num_envs", "12", "--group_size", "4"], mixed),
]


@pytest.mark.parametrize("estimator,env_id,flags,policy", ROLLOUTS)
def test_rollout_is_gymnasiums(estimator, env_id, flags, policy):
    """Every recorded episode, step by step, in an environment of gymnasium's."""
    trainer = make_trainer(estimator, "--env_id", env_id, *flags)
    trainer.actor = policy or trainer.actor
    states = watch(trainer)
    batch = cp.sample_batch(trainer)
    env, whole = gym.make(env_id), not trainer.args.num_steps
    num, steps = batch.mask.shape
    assert len(states) == steps and batch.observations.shape == (num, steps + 1, 4)
    for x in (batch.observations, batch.logp_old, batch.rewards):
        assert x.dtype == torch.float32
    finished = []
    for n in range(num):
        t, ended = 0, False
        while t < steps and not (whole and ended):
            assert batch.mask[n, t]
            start = states[t][:, n]
            close(batch.observations[n, t], torch.tensor(start).float(), 1e-7)
            told = replay(env, start, batch.actions[n, t:].tolist())
            observations, rewards, terminated, truncated = told
            length, end = len(rewards), t + len(rewards)
            assert batch.mask[n, t:end].all()
            ours = batch.observations[n, t + 1 : end + 1]
            close(ours, torch.tensor(observations), 2e-5)  # the last one before any reset
            assert batch.rewards[n, t:end].tolist() == rewards == [1.0] * length
            assert batch.terminated[n, t:end].tolist() == terminated
            assert batch.truncated[n, t:end].tolist() == truncated
            ended = terminated[-1] or truncated[-1]
            finished += [length] * ended
            t = end + 1
            if ended and end < steps and not whole:  # autoreset takes a row
                assert not batch.mask[n, end]
        if whole:  # each environment gives one episode, and nothing after it
            assert ended and not batch.mask[n, end:].any()
        else:
            assert trainer.ended[n] == (batch.terminated | batch.truncated)[n, -1]
    out = ~batch.mask
    assert out.any() and not batch.rewards[out].any()
    assert not (batch.terminated | batch.truncated)[out].any()
    assert batch.truncated.any() == (policy is not None) and batch.terminated.any()
    assert sorted(finished) == sorted(trainer.finished)
    logits = (trainer.actor if policy is None else mixed)(
        batch.observations[:, :-1] if policy is None else batch.observations[:, 0]
    )
    if policy is None:
        for n, t in batch.mask.nonzero()[::50].tolist():
            expected = logits[n, t].log_softmax(dim=0)[batch.actions[n, t]]
            assert batch.logp_old[n, t].item() == pytest.approx(expected.item(), abs=1e-6)
        pushed = batch.actions[batch.mask].float()
        assert abs(pushed.mean() - 0.5) < 0.03
    if whole:
        assert steps == batch.mask.sum(dim=1).max()


@pytest.mark.parametrize("estimator", [*WITH_V, "baseline"])
def test_out_of_time_bootstraps_and_a_fall_in_the_last_step_does_not(estimator):
    """Environment 0 falls in step 200 of 200, 1 stands: terminated only, truncated only."""
    flags = ["--env_id", "CartPole-v0", "--num_envs", "2", "--gamma", "0.9"]
    trainer = make_trainer(estimator, *flags)
    trainer.actor = controller
    if trainer.args.num_steps:
        trainer.args.num_steps = 1
    else:  # whole episodes: keep the state that is set below
        trainer.start_episodes = lambda: None
    trainer.envs.steps[:] = 199
    trainer.envs.state = np.array([[0, 0], [0, 0], [0.2094, 0], [2.0, 0.1]])
    trainer.observation = trainer.envs.state.T.astype(np.float32)
    batch = cp.sample_batch(trainer)
    assert batch.terminated.tolist() == [[True], [False]]
    assert batch.truncated.tolist() == [[False], [True]]
    values = trainer.critic(batch.observations).squeeze(2).detach()
    advantages, returns = cp.prepare_inputs(trainer.args, batch, values)
    v = values[1, 1].item()
    assert abs(v) > 1e-4
    assert returns.flatten().tolist() == pytest.approx([1.0, 1 + 0.9 * v], abs=1e-6)
    expected = (returns - values[:, :1]).flatten().tolist()
    assert advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_returns_over_many_rollouts():
    flags = ["--num_envs", "6", "--num_steps", "7"]
    trainer = make_trainer("nstep", *flags)
    batches = [cp.sample_batch(trainer) for _ in range(30)]
    mask, terminated, rewards = (
        torch.cat([getattr(b, name) for b in batches], dim=1)
        for name in ("mask", "terminated", "rewards")
    )
    running, finished = [0.0] * 6, []
    for t in range(210):
        for n in range(6):
            assert mask[n, t] == (t == 0 or not terminated[n, t - 1])  # across batches, too
            running[n] += rewards[n, t].item()
            if terminated[n, t]:
                finished.append(running[n])
                running[n] = 0.0
    assert trainer.finished == finished and len(finished) > 20
    assert trainer.running.tolist() == running
    for one, two in pairwise(batches):
        assert torch.equal(one.observations[:, -1], two.observations[:, 0])


def test_the_seed_reaches_networks_starts_and_actions():
    one, again, two = (make_trainer("gae", "--seed", seed) for seed in ("1", "1", "2"))
    for get in (weights, lambda t: torch.tensor(t.observation), lambda t: t.generator.get_state()):
        assert torch.equal(get(one), get(again)) and not torch.equal(get(one), get(two))


def test_networks():
    """Orthogonal weights of gain sqrt 2, sqrt 2 and 0.01 (V: 1), biases 0, tanh between them."""
    trainer = make_trainer("gae", "--hidden_size", "16")
    for net, outputs, last in (trainer.actor, 2, 0.01), (trainer.critic, 1, 1.0):
        (w1, b1), (w2, b2), (w3, b3) = ((x.weight, x.bias) for x in net[::2])
        close(w1.T @ w1, 2 * torch.eye(4), 1e-5)
        close(w2.T @ w2, 2 * torch.eye(16), 1e-5)
        close(w3 @ w3.T / last**2, torch.eye(outputs), 1e-5)
        assert not any(b.any() for b in (b1, b2, b3))
        x = torch.randn(7, 4)
        close(net(x), (w3 @ (w2 @ (w1 @ x.T).tanh()).tanh()).T, 1e-5)
    assert trainer.optimizer.defaults["eps"] == 1e-5


def test_draw_is_softmax():
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 5.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    for row in logits:
        actions = cp.draw(row.expand(100_000, 3), generator)
        expected = row.softmax(dim=0).double() * 100_000
        found = actions.bincount(minlength=3).double()
        exact = (expected / expected.sum() * 1e5).numpy()
        assert stats.chisquare(found.numpy(), exact).pvalue > 1e-4
    one, two = (cp.draw(logits.repeat(500, 1), torch.Generator().manual_seed(s)) for s in (1, 2))
    assert not torch.equal(one, two)


def test_a_group_shares_its_start():
    trainer = make_trainer("grpo", "--num_envs", "12", "--group_size", "4")
    states, seen = watch(trainer), set()
    for _ in range(3):
        states.clear()
        batch = cp.sample_batch(trainer)
        groups = batch.observations[:, 0].view(3, 4, 4)
        assert (groups == groups[:, :1]).all()
        close(batch.observations[:, 0], torch.tensor(states[0].T).float(), 1e-9)
        seen |= {tuple(group[0].tolist()) for group in groups}
        assert len({tuple(row.tolist()) for row in batch.actions}) > 6  # the answers differ
        assert groups.abs().max() <= 0.05
    assert len(seen) == 9
    batch = cp.sample_batch(make_trainer("reinforce", "--num_envs", "12"))
    assert len({tuple(row.tolist()) for row in batch.observations[:, 0]}) == 12


@pytest.mark.parametrize("num_envs", [1, 3])
def test_actor_critic_moves_after_every_step(num_envs):
    trainer = make_trainer("actor_critic", "--num_envs", str(num_envs))
    resets = 0
    for _ in range(120):
        before, parts = trainer.env_steps, copy.deepcopy(weights(trainer))
        updates, critic = trainer.updates, trainer.critic[-1].bias.item()
        actor = trainer.actor[-1].bias.tolist()
        active = int((~trainer.ended).sum())
        trainer.update()
        assert trainer.env_steps - before == active
        assert trainer.updates - updates == (active > 0)
        if active:
            assert trainer.critic[-1].bias.item() != critic
            assert trainer.actor[-1].bias.tolist() != actor
        else:
            assert torch.equal(parts, weights(trainer))
        resets += num_envs - active
    assert resets > 2


# ---- 5  evaluation -------------------------------------------------------------------------------


def test_evaluate_halves_and_first_episodes_only():
    """Always to the right: each half's mean length is that of gymnasium's from the same starts."""
    envs = cp.make_envs("CartPole-v1", 40)
    right = lambda x: torch.tensor([[0.0, 50.0]]).expand(len(x), 2)  # noqa: E731
    for seed in ([], [7]):
        envs.reset(seed=seed[0] if seed else cp.UNSEEN)
        starts, env = np.array(envs.state), gym.make("CartPole-v1")
        lengths = [len(replay(env, starts[:, n], [1] * 99)[1]) for n in range(40)]
        result = cp.evaluate(right, envs, CPU, *seed)
        assert result["eval/greedy"] == pytest.approx(statistics.mean(lengths[:20]))
        assert result["eval/sampled"] == pytest.approx(statistics.mean(lengths[20:]))
        assert result["eval/greedy"] != result["eval/sampled"]
    soft = cp.evaluate(lambda x: controller(x, 0.1), envs, CPU)
    assert soft["eval/greedy"] > 300 and soft["eval/sampled"] < 60
    assert soft == cp.evaluate(lambda x: controller(x, 0.1), envs, CPU)
    assert cp.evaluate(controller, cp.make_envs("CartPole-v0", 8), CPU)["eval/greedy"] == 200


def test_starts_of_the_evaluation_are_unseen_and_the_same_for_all_seeds():
    starts = []
    for seed in ("1", "2"):
        trainer = make_trainer("gae", "--seed", seed, "--eval_episodes", "40")
        cp.evaluate(controller, trainer.eval_envs, CPU)
        kept = []
        cp.evaluate(lambda x, kept=kept: kept.append(x) or controller(x), trainer.eval_envs, CPU)
        starts.append({tuple(row) for row in kept[0].tolist()})
    assert starts[0] == starts[1] and len(starts[0]) == 80
    trained, play = set(), set()
    for seed in ("0", "1", "42"):
        for estimator in ("reinforce", "gae"):
            trainer = make_trainer(estimator, "--seed", seed, "--num_envs", "32")
            for _ in range(20):
                batch = cp.sample_batch(trainer)
                first = batch.mask & ~torch.cat([torch.zeros(32, 1).bool(), batch.mask[:, :-1]], 1)
                trained |= {tuple(x.tolist()) for x in batch.observations[:, :-1][first]}
        env = gym.make("CartPole-v1")
        play.add(tuple(env.reset(seed=cp.UNSEEN + int(seed))[0].tolist()))
    assert len(trained) > 1000 and not trained & (starts[0] | play)


def test_evaluation_does_not_disturb_training(tmp_path):
    found = []
    for every in ("1000", "0"):
        flags = ["--eval_every", every, "--max_steps", "3000", "--target_return", "0"]
        args = make_args("gae", *flags, "--eval_episodes", "3", "--output_dir", str(tmp_path))
        found.append(state(Path(cp.train(args)["run_dir"])))
    for one in found:
        one.pop("pending")
    assert same(*found)


# ---- 6  run folder, metrics, checkpoints, resume -------------------------------------------------


def short(estimator: str, folder: Path, name: str, *flags: str) -> list[str]:
    """A run of some 2000 steps with three checkpoints, evaluated at each."""
    line = "--quiet --threads 1 --max_steps 2000 --save_steps 600 --eval_every 600 --num_envs 8 "
    line += f"--eval_episodes 3 --target_return 0 --adv_estimator {estimator} --run_name {name}"
    some = ["--group_size", "4"] if estimator == "grpo" else []
    return [*line.split(), *some, "--output_dir", str(folder), *flags]


@pytest.mark.parametrize(
    "estimator", ["ppo", "actor_critic", "nstep", "grpo", "baseline", "vanilla"]
)
def test_resume_equals_never_stopping(estimator, tmp_path, monkeypatch):
    assert cp.main(short(estimator, tmp_path, "whole", "--anneal")) == 0
    whole = tmp_path / cp.SCRIPT / "whole"
    first = sorted(whole.glob("checkpoint-0*.pt"))[0]
    half, updates = check_resume(cp, whole, first.name, monkeypatch)
    early, late = state(half, first.name), state(half)
    assert updates == late["counters"][1] - early["counters"][1]  # not all over again
    steps = [row["step"] for row in metrics(whole)]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] >= 2000
    assert cp.main(short(estimator, tmp_path, "again", "--anneal")) == 0
    assert same(state(whole), state(tmp_path / cp.SCRIPT / "again"))
    assert cp.main(short(estimator, tmp_path, "other", "--anneal", "--seed", "7")) == 0
    other = state(tmp_path / cp.SCRIPT / "other")
    for name in ("actor", "optimizer"):
        assert not same(state(whole)["parts"][name], other["parts"][name])


def test_a_checkpoint_between_an_end_and_its_reset(tmp_path):
    """Step counts, and which environments reset next, are in it, too."""
    flags = ["--num_envs", "4", "--num_steps", "3"]
    one, two = (make_trainer("gae", *flags, "--seed", seed) for seed in ("1", "2"))
    while not (one.ended.any() and one.updates > 9):
        one.update()
    one.save_model(tmp_path / "a.pt")
    two.load_model(str(tmp_path / "a.pt"))
    for _ in range(2):
        for name in ("state", "steps", "prev_done"):
            assert np.array_equal(getattr(one.envs, name), getattr(two.envs, name))
        for name in ("observation", "ended", "running"):
            assert np.array_equal(getattr(one, name), getattr(two, name))
        assert torch.equal(weights(one), weights(two)) and one.finished == two.finished
        one.update()
        two.update()


def test_more_steps_after_the_end(tmp_path):
    """--max_steps may grow on resume: the same run as with it from the start."""
    assert cp.main(short("gae", tmp_path, "a", "--max_steps", "1000")) == 0
    folder = tmp_path / cp.SCRIPT / "a"
    more = ["--resume", str(folder / "checkpoint-last.pt"), "--max_steps", "2000", "--quiet"]
    assert cp.main(more) == 0
    assert cp.main(short("gae", tmp_path, "b")) == 0
    for part in ("parts", "envs", "rng", "generators", "counters"):
        assert same(state(folder)[part], state(tmp_path / cp.SCRIPT / "b")[part])


def test_interrupt_saves_and_resumes_exactly(tmp_path, monkeypatch, capsys):
    flags = short("gae", tmp_path, "a", "--save_steps", "0")
    flags.remove("--quiet")
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, cp, 9)
        assert cp.main(flags) == 130
    assert signal.getsignal(signal.SIGINT) is before
    folder = tmp_path / cp.SCRIPT / "a"
    assert f"go on: python {cp.SCRIPT}.py --resume {folder}/check" in capsys.readouterr().out
    stopped = state(folder)
    assert stopped["counters"][1] == 9 and stopped["pending"][1]["losses/entropy"][1] == 9
    assert cp.main(["--resume", str(folder / "checkpoint-last.pt"), "--quiet"]) == 0
    assert cp.main(short("gae", tmp_path, "b", "--save_steps", "0")) == 0
    assert same(state(folder), state(tmp_path / cp.SCRIPT / "b"))
    assert metrics(folder) == metrics(tmp_path / cp.SCRIPT / "b")
    check_second_interrupt(cp, short("gae", tmp_path, "c"), monkeypatch, capsys)


def test_interrupt_before_the_first_update_leaves_something_to_resume(
    tmp_path, monkeypatch, capsys
):
    """Ctrl-C during the first evaluation: what the summary says to resume exists."""
    with monkeypatch.context() as patch:
        interrupt_first_evaluation(patch, cp)
        flags = short("gae", tmp_path, "a")
        flags.remove("--quiet")
        assert cp.main(flags) == 130
    path = tmp_path / cp.SCRIPT / "a" / "checkpoint-last.pt"
    assert str(path) in capsys.readouterr().out
    assert path.exists()
    assert cp.main(["--resume", str(path), "--quiet"]) == 0
    assert cp.main(short("gae", tmp_path, "b")) == 0
    assert same(state(path.parent)["parts"], state(tmp_path / cp.SCRIPT / "b")["parts"])


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    assert cp.main(short("gae", tmp_path, "a")) == 0
    path = tmp_path / cp.SCRIPT / "a" / "checkpoint-last.pt"
    flags = ["--resume", str(path), "--max_steps", "2500"]
    check_full_disk(cp, path, flags, monkeypatch, capsys)


def test_kill_while_saving_keeps_the_last_checkpoint(tmp_path):
    """kill -9 between writing the temporary file and renaming it, and in the middle of writing."""
    assert cp.main(short("gae", tmp_path, "a")) == 0
    folder = tmp_path / cp.SCRIPT / "a"
    path = folder / "checkpoint-last.pt"
    check_kill_while_saving(cp, path, "--max_steps", "2500")
    assert cp.main(["--resume", str(path), "--max_steps", "2500", "--quiet"]) == 0
    steps = [row["step"] for row in metrics(folder)]
    assert steps == sorted(set(steps)) and steps[-1] >= 2500


@pytest.mark.parametrize(
    "name,estimator,tensor",
    [
        ("compute_gae", "ppo", "advantages"),
        ("compute_nstep", "nstep", "advantages"),
        ("clipped_surrogate", "grpo", "loss"),
        ("value_loss", "baseline", "loss"),
    ],
)
def test_nan_stops_the_run_and_names_the_tensor(
    name, estimator, tensor, tmp_path, monkeypatch, capsys
):
    break_with_nan(monkeypatch, cp, name, after=6)
    flags = ["--save_steps", "1", *(["--update_epochs", "1"] if estimator == "grpo" else [])]
    assert cp.main(short(estimator, tmp_path, "a", *flags)) == 1
    error = capsys.readouterr().err
    assert f"{tensor} is NaN" in error and error.count("\n") == 1
    folder = tmp_path / cp.SCRIPT / "a"
    assert f"update {state(folder)['counters'][1] + 1}: " in error
    parts = state(folder)["parts"]
    assert all(v.isfinite().all() for v in parts["actor"].values())


LOSSES = ["policy_loss", "entropy", "grad_norm"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_run_folder_and_tags(estimator, tmp_path):
    assert cp.main(short(estimator, tmp_path, "a", "--env_id", "CartPole-v0")) == 0
    folder = tmp_path / cp.SCRIPT / "a"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoint-last.pt"} <= names
    assert [*folder.glob("checkpoint-0*.pt")] and not [*folder.glob("*.tmp")]
    config = json.loads((folder / "config.json").read_text())
    assert config["seed"] == 42 and config["adv_estimator"] == estimator and config["torch"]
    for name in {name for some in cp.SETTINGS.values() for name in some}:
        assert (config[name] is not None) == (name in cp.SETTINGS[estimator])
    losses = [*LOSSES, *["value_loss", "explained_variance"] * (estimator in [*WITH_V, "baseline"])]
    losses += ["approx_kl", "clipfrac"] * (estimator in cp.CLIPPED)
    expected = {f"losses/{name}" for name in losses}
    expected |= {f"charts/{name}" for name in ("learning_rate", "updates", "train_seconds", "SPS")}
    expected |= {"charts/episodic_return", "charts/episodic_length"}
    expected |= {"score/mean", "score/max", "score/min"}
    expected |= {"group/zero_std_frac", "group/reward_std"} if estimator == "grpo" else set()
    evaluated = {"eval/greedy", "eval/sampled"}
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0].keys() == {"step", *evaluated}
    for row in rows[1:]:
        assert row.keys() - evaluated - {"step"} == expected
        assert all(math.isfinite(v) for v in row.values())
    assert rows[-1].keys() >= evaluated
    events = events_of(folder, images=0)
    tags = set(events.Tags()["scalars"])
    assert tags == expected | evaluated | {"hparam/greedy", "hparam/sampled"}
    assert events.Tags()["images"] == ["agent/sampled"]
    told = [(e.step, e.value) for e in events.Scalars("losses/policy_loss")]
    assert told == [
        (row["step"], pytest.approx(row["losses/policy_loss"], rel=1e-5)) for row in rows[1:]
    ]
    assert events.Scalars("eval/greedy")[0].step == 0
    kept = (folder / "metrics.jsonl").read_text()
    if estimator == "gae":
        assert cp.main(short(estimator, tmp_path, "a")) == 0
        assert (tmp_path / cp.SCRIPT / "a-2").is_dir()  # never overwritten
        assert (folder / "metrics.jsonl").read_text() == kept


@pytest.mark.parametrize("estimator", ["ppo", "grpo", "gae"])
def test_a_row_is_the_mean_since_the_last(estimator):
    trainer, seen, real = make_trainer(estimator, "--num_envs", "16"), [], cp.Trainer.record
    trainer.record = lambda m: (seen.append(m), real(trainer, m))
    extra = {"grpo": "group/reward_std"}.get(estimator, "losses/explained_variance")
    trainer.train_seconds = 2.0
    for _ in range(2):  # the second row starts afresh
        seen.clear()
        episodes_before = trainer.finished
        assert episodes_before == []
        for _ in range(4):
            trainer.update()
        finished = list(trainer.finished)
        row = trainer.row()
        assert len([m for m in seen if extra in m]) == 4  # one a batch, not a minibatch
        for name in {name for m in seen for name in m}:
            mean = statistics.mean(m[name].item() for m in seen if name in m)
            assert row[name] == pytest.approx(mean, rel=1e-6, abs=1e-9)
        assert row["charts/SPS"] == trainer.env_steps / 2.0
        assert row["charts/updates"] == trainer.updates
        if finished:
            told = [row[f"score/{name}"] for name in ("mean", "max", "min")]
            assert told == [statistics.mean(finished), max(finished), min(finished)]
            assert row["charts/episodic_return"] == row["charts/episodic_length"] == told[0]


def test_statistics_of_groups_and_critic(monkeypatch):
    kept, real = [], cp.update_model
    monkeypatch.setattr(cp, "update_model", lambda *a: kept.append(a[1:]) or real(*a))
    flags = ["--num_envs", "12", "--group_size", "4", "--gamma", "0.9"]
    trainer = make_trainer("grpo", *flags)
    trainer.update()
    (batch, advantages, _), scores = kept.pop(), []
    for row in batch.rewards.tolist():
        scores.append(sum(0.9**t * r for t, r in enumerate(row)))
    spreads = [statistics.stdev(scores[i : i + 4]) for i in (0, 4, 8)]
    row = {name: total / number for name, (total, number) in trainer.sums.items()}
    assert row["group/reward_std"] == pytest.approx(statistics.mean(spreads), rel=1e-4)
    flat = (advantages.reshape(3, -1) == 0).all(dim=1).float().mean().item()
    assert row["group/zero_std_frac"] == pytest.approx(flat)
    trainer = make_trainer("gae", "--num_envs", "12")
    critic = copy.deepcopy(trainer.critic)
    trainer.update()
    batch, _, returns = kept.pop()
    values = critic(batch.observations[:, :-1]).squeeze(2).detach()[batch.mask].numpy()
    target = returns[batch.mask].numpy()
    row = {name: total / number for name, (total, number) in trainer.sums.items()}
    expected = 1 - np.var(target - values) / np.var(target)
    assert row["losses/explained_variance"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_early_stop(tmp_path, monkeypatch):
    run = lambda name, *flags: cp.train(  # noqa: E731
        cp.parse_args(
            [*short("gae", tmp_path, name, "--eval_every", "500", "--num_steps", "8"), *flags]
        )
    )
    result = run("a", "--target_return", "5")
    assert 500 <= result["env_steps"] < 600 and not result["stopped"] and not result["solved"]
    result = run("b", "--target_return", "0")
    assert not result["solved"] and result["env_steps"] >= 2000
    told = {"eval/greedy": 100.0, "eval/sampled": 40.0}
    monkeypatch.setattr(cp, "evaluate", lambda *a, **k: dict(told))
    assert run("c", "--target_return", "50")["env_steps"] >= 2000  # both must reach it
    told["eval/sampled"] = 50.0
    result = run("d", "--target_return", "50")
    assert not result["solved"] and result["env_steps"] < 600 and result["sampled"] == 50
    told |= {"eval/greedy": 475.0, "eval/sampled": 475.0}
    assert run("e")["solved"] and run("f", "--target_return", "0")["solved"]
    told["eval/sampled"] = 474.9
    assert not run("g")["solved"]
    assert make_args("gae").target_return == 475
    assert make_args("gae", "--env_id", "CartPole-v0").target_return == 195


def test_evaluations_logs_and_checkpoints_come_when_due(tmp_path):
    flags = [
        "--eval_every",
        "500",
        "--save_steps",
        "700",
        "--max_steps",
        "2100",
        "--num_steps",
        "8",
    ]
    assert cp.main(short("gae", tmp_path, "a", *flags)) == 0
    rows = metrics(tmp_path / cp.SCRIPT / "a")
    evaluated = [row["step"] for row in rows if "eval/greedy" in row]
    assert [step // 500 for step in evaluated] == [0, 1, 2, 3, 4, 4]
    assert {row["step"] // 1000 for row in rows} == {0, 1, 2}
    saved = sorted((tmp_path / cp.SCRIPT / "a").glob("checkpoint-0*.pt"))
    assert [int(path.stem[-6:]) // 700 for path in saved] == [1, 2, 3]
    for path in saved:
        assert cp.load_checkpoint(str(path))["counters"][0] == int(path.stem[-6:])
    assert cp.main(short("gae", tmp_path, "b", "--save_steps", "0", "--eval_every", "0")) == 0
    folder = tmp_path / cp.SCRIPT / "b"
    assert [path.name for path in folder.glob("*.pt")] == ["checkpoint-last.pt"]
    rows = metrics(folder)
    assert ["eval/greedy" in row for row in rows] == [True, *[False] * (len(rows) - 2), True]


def test_all_estimators_and_a_table(tmp_path, capsys):
    flags = ["--adv_estimator", "all", "--max_steps", "1000", "--threads", "1"]
    assert cp.main([*flags, "--eval_episodes", "3", "--output_dir", str(tmp_path)]) == 0
    (folder,) = (tmp_path / cp.SCRIPT).iterdir()
    assert folder.name == "all-v1-seed42"
    assert {path.name for path in folder.iterdir()} == set(ESTIMATORS)
    text = capsys.readouterr().out
    for name, phi in cp.PHI.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert phi in line
        config = json.loads((folder / name / "config.json").read_text())
        assert config["adv_estimator"] == name
        defaults = vars(make_args(name))
        for flag in ("gamma", "num_steps", "actor_learning_rate", "lam", "clip_epsilon"):
            assert config[flag] == defaults[flag]
        last = metrics(folder / name)[-1]
        told = last["eval/greedy"], last["eval/sampled"], cp.area_under_curve(folder / name)
        assert line.split()[-3:] == [f"{x:.1f}" for x in told]
        assert line.split()[-5] == "-"  # not solved
    path = str(folder / "ppo" / "checkpoint-last.pt")  # a member's checkpoint is like any other
    assert cp.main(["--resume", path, "--max_steps", "2500", "--quiet"]) == 0


def test_area_under_the_curve(tmp_path):
    rows = [
        {"step": 0, "eval/sampled": 0.0},
        {"step": 300, "losses/entropy": 1.0},
        {"step": 400, "eval/sampled": 100.0},
        {"step": 600, "eval/sampled": 40.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = [0, 25, 50, 75, 100, 70, 40, 40, 40, 40]  # at 0, 100, ... 900
    assert cp.area_under_curve(tmp_path, 1000) == pytest.approx(statistics.mean(points))
    expected = (sum(points) + 990 * 40) / 1000
    assert cp.area_under_curve(tmp_path) == pytest.approx(expected)


def test_infer(tmp_path, capsys, monkeypatch):
    assert cp.main(short("ppo", tmp_path, "a")) == 0
    path = tmp_path / cp.SCRIPT / "a" / "checkpoint-last.pt"
    before = path.read_bytes(), sorted(path.parent.iterdir())
    assert cp.main(["--infer", str(path)]) == 0
    text = capsys.readouterr().out
    last = metrics(path.parent)[-1]
    assert f"greedy {last['eval/greedy']:.1f}, sampled {last['eval/sampled']:.1f}" in text
    assert "3 unseen episodes" in text and "threshold 475" in text
    assert cp.main(["--infer", str(path)]) == 0
    assert capsys.readouterr().out == text  # the same seed shows the same
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before
    more = ["--seed", "1", "--greedy", "--render", "gif", "--env_id", "CartPole-v0"]
    assert cp.main(["--infer", str(path), *more]) == 0
    assert "threshold 195" in capsys.readouterr().out
    from PIL import Image

    with Image.open(path.with_name("episode-seed1.gif")) as gif:
        assert gif.format == "GIF" and gif.n_frames >= 2
    assert path.read_bytes() == before[0]


def test_play_takes_the_policys_actions():
    seen = []

    class Policy(torch.nn.Linear):
        def forward(self, x):
            seen.append(x[0].tolist())
            return controller(x, 0.1)

    args = make_args("gae", "--env_id", "CartPole-v0")
    args.greedy = True
    frames, total = cp.play(Policy(4, 2), args, "rgb_array")
    assert total == 200 and len(frames) == 50 and frames[0].shape == (200, 300, 3)
    start, _ = gym.make("CartPole-v0").reset(seed=cp.UNSEEN + 42)
    assert seen[0] == start.tolist()  # one that no training starts from
    args.greedy = False
    assert cp.play(Policy(4, 2), args, "rgb_array")[1] < 150
    totals = set()
    for args.seed in range(4):
        totals.add(cp.play(Policy(4, 2), args, "rgb_array")[1])
    assert len(totals) > 1


def test_summary_says_solved_where_it_is():
    result = {"sampled": 480.0, "greedy": 474.0, "adv_estimator": "gae", "solved": False}
    result |= {"env_steps": 7000, "updates": 9, "train_seconds": 1.0, "seconds": 2.0, "auc": 3.0}
    result |= {"run_dir": "r/s/a", "stopped": False}
    args = make_args("gae")
    assert "\nnot solved after 7,000 environment steps" in cp.summary([result], args)
    assert "\nsolved after" in cp.summary([result | {"solved": True}], args)
    assert "--resume" not in cp.summary([result], args)
    text = cp.summary([result | {"stopped": True}], args)
    assert "--resume r/s/a/checkpoint-last.pt" in text


# ---- 7  bad input, defaults ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    folder, bad = (tmp_path_factory.mktemp(name) for name in ("good", "bad"))
    assert cp.main(short("ppo", folder, "a")) == 0
    good = folder / cp.SCRIPT / "a" / "checkpoint-last.pt"
    earlier = sorted(good.parent.glob("checkpoint-0*.pt"))[0]
    return bad_files(cp, good, bad, missing="hidden_size") | {"EARLIER": earlier}


@pytest.mark.parametrize(
    "line,word",
    [
        ("--adv_estimator nstep --n_steps 0", "n_steps"),
        ("--greedy", "greedy"),
        ("--render gif", "render"),
        (
            "--adv_estimator baseline --baseline trajectory_mean --critic_learning_rate 0.1",
            "critic",
        ),
        ("--adv_estimator nstep --n_steps 20 --num_steps 8", "n_steps"),
        ("--adv_estimator all --n_steps 20 --num_steps 8", "n_steps"),
        ("--num_envs 0", "num_envs"),
        ("--adv_estimator grpo --group_size 5", "group_size"),
        ("--adv_estimator grpo --group_size 1", "group_size"),
        ("--adv_estimator grpo --num_envs 1", "group_size"),
        ("--adv_estimator all --group_size 5", "group_size"),
        ("--env_id Pendulum-v1", "env_id"),
        ("--env_id Nonsense", "env_id"),
        ("--adv_estimator dqn", "adv_estimator"),
        ("--adv_estimator vanilla --lam 0.9", "lam"),
        ("--adv_estimator gae --update_epochs 2", "update_epochs"),
        ("--adv_estimator gae --clip_epsilon 0.1", "clip_epsilon"),
        ("--adv_estimator gae --baseline value", "baseline"),
        ("--adv_estimator reinforce --critic_learning_rate 1e-3", "critic_learning_rate"),
        ("--group_size 4", "group_size"),
        ("--n_steps 3", "n_steps"),
        ("--run_name a/b", "run_name"),
        ("--run_name ..", "run_name"),
        ("--gamma 2", "gamma"),
        ("--gamma nan", "gamma"),
        ("--gamma x", "gamma"),
        ("--lam -1", "lam"),
        ("--clip_epsilon -0.1", "clip_epsilon"),
        ("--max_steps 0", "max_steps"),
        ("--max_grad_norm 0", "max_grad_norm"),
        ("--seed 2147483648", "seed"),
        ("--seed -1", "seed"),
        ("--eval_episodes 0", "eval_episodes"),
        ("--device nonsense", "device"),
        ("--device meta", "device"),
        # episodes that a batch cuts have no return
        ("--adv_estimator vanilla --num_steps 8", "num_steps"),
        ("--adv_estimator reinforce --num_steps 8", "num_steps"),
        ("--adv_estimator baseline --num_steps 8", "num_steps"),
        ("--adv_estimator grpo --num_steps 8", "num_steps"),
        ("--resume MISSING", "resume"),
        ("--resume TRUNCATED", "resume"),
        ("--resume FOREIGN", "resume"),
        ("--resume OLDER", "resume"),
        ("--resume FOLDER", "resume"),
        ("--resume EARLIER --max_steps 9000", "resume"),
        ("--resume CHECKPOINT", "max_steps"),
        ("--resume CHECKPOINT --max_steps 9000 --adv_estimator gae", "adv_estimator"),
        ("--resume CHECKPOINT --max_steps 9000 --seed 1", "seed"),
        ("--resume CHECKPOINT --max_steps 9000 --group_size 4", "group_size"),
        ("--resume CHECKPOINT --max_steps 9000 --gamma 0.5", "gamma"),
        ("--infer CHECKPOINT --resume CHECKPOINT", "infer"),
        ("--infer CHECKPOINT --lam 0.1", "lam"),
        ("--infer MISSING", "infer"),
    ],
)
def test_bad_input(line, word, tmp_path, capsys, files):
    flags = [str(files.get(flag, flag)) for flag in line.split()]
    untouched = [files["FOLDER"], files["CHECKPOINT"].parent]
    error = check_refused(cp, flags, tmp_path, capsys, untouched)
    assert error.startswith(f"argument --{word}")


def test_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    check_unwritable(cp, short("gae", tmp_path / "file", "a"), capsys)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_complete(estimator):
    args = make_args(estimator)
    names = {name for some in cp.SETTINGS.values() for name in some}
    for name in names:
        assert getattr(args, name) == cp.SETTINGS[estimator].get(name)
    assert cp.has_critic(args) == (estimator in [*WITH_V, "baseline"])
    assert hasattr(make_trainer(estimator), "critic") == cp.has_critic(args)
    given = make_args(estimator, "--gamma", "0.5", "--actor_learning_rate", "0.25")
    assert (given.gamma, given.actor_learning_rate) == (0.5, 0.25)
    assert (not args.num_steps) == (estimator in ("vanilla", "reinforce", "baseline", "grpo"))


@pytest.mark.parametrize("estimator", WITH_V)
def test_num_steps_0_is_whole_episodes(estimator, tmp_path):
    assert cp.main(short(estimator, tmp_path, "a", "--num_steps", "0")) == 0
    trainer = make_trainer(estimator, "--num_steps", "0", "--num_envs", "3")
    batch = cp.sample_batch(trainer)
    assert ((batch.terminated | batch.truncated).sum(dim=1) == 1).all()


def test_defaults_that_depend_on_other_flags():
    assert make_args("nstep", "--n_steps", "20").num_steps == 20
    assert make_args("nstep", "--n_steps", "3").num_steps == cp.SETTINGS["nstep"]["num_steps"]
    assert make_args("nstep").run_name == "nstep-v1-seed42"
    assert make_args("gae", "--env_id", "CartPole-v0", "--seed", "3").run_name == "gae-v0-seed3"


def test_nothing_is_created_on_the_wrong_device():
    """Tensors made without a device would land on the default one, here the shapeless `meta`."""
    for estimator in ("ppo", "grpo", "nstep", "baseline", "vanilla"):
        trainer = make_trainer(estimator, "--device", "cpu", "--num_envs", "16")
        trainer.update()  # Adam makes its state at the first step
        with torch.device("meta"):
            trainer.update()
            result = cp.evaluate(trainer.actor, trainer.eval_envs, trainer.device)
        assert all(math.isfinite(v) for v in result.values()) and trainer.sums


@pytest.mark.cuda
@pytest.mark.parametrize("estimator", ["ppo", "grpo", "actor_critic"])
def test_cuda(estimator, tmp_path):
    assert cp.main(short(estimator, tmp_path, "a", "--device", "cuda")) == 0
    assert state(tmp_path / cp.SCRIPT / "a")["counters"][0] >= 2000


# ---- 8  learning ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator,seed,flags",
    [
        ("vanilla", "303", V0),  # the two that take longest: the shorter task
        ("reinforce", "302", []),
        ("baseline", "302", []),
        ("actor_critic", "302", V0),
        ("nstep", "303", []),
        ("gae", "303", []),
        ("ppo", "301", []),
        ("grpo", "303", []),
        ("baseline", "300", ["--baseline", "trajectory_mean"]),
        ("baseline", "300", ["--baseline", "batch_time_mean"]),
    ],
)
def test_default_run_solves(estimator, seed, flags, tmp_path):
    """All ten seeds of the benchmark solve it; these do soon."""
    result = cp.train(make_args(estimator, *flags, "--seed", seed, "--output_dir", str(tmp_path)))
    least = 195 if flags == V0 else 475
    assert result["solved"] and min(result["greedy"], result["sampled"]) >= least
    rows = metrics(Path(result["run_dir"]))
    assert rows[0]["eval/sampled"] < 60 and rows[-1]["eval/sampled"] >= least
