"""frozen_lake_ppo_grpo.py: formulas twice, golden values, identities, environment, learning."""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats

import frozen_lake_ppo_grpo as fl
from conftest import (
    bad_files,
    break_with_nan,
    check_full_disk,
    check_kill_while_saving,
    check_refused,
    check_resume,
    check_second_interrupt,
    check_unwritable,
    events_of,
    golden,
    metrics,
    same,
    start,
    state,
)

CPU = torch.device("cpu")


def make_args(*flags: str) -> argparse.Namespace:
    return fl.parse_args(["--threads", "1", *flags, "--quiet"])


def make_lakes(size=4, number=6, slippery=False, seed=0, encoding="onehot") -> fl.Lakes:
    maps = fl.draw_maps(np.random.default_rng(seed), number, size, held_out=False)
    return fl.build_lakes(maps, slippery, encoding, CPU)


def random_log_probs(lakes: fl.Lakes, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(lakes.live.numel(), 4, generator=generator).log_softmax(dim=1)


def ragged(num=7, length=9, seed=0):
    """Random (N, T) data whose rows end at different steps, one of them truncated at the last."""
    rng = np.random.default_rng(seed)
    lengths = np.array([length, 1, *rng.integers(1, length + 1, num - 2)])
    mask = np.arange(length)[None] < lengths[:, None]
    draw = lambda: torch.tensor(rng.normal(size=(num, length)))  # noqa: E731
    return torch.tensor(mask), draw


# ---- 1  the maths, each formula against a transcription in loops ---------------------------------


@pytest.mark.parametrize("gamma,lam", [(0.9, 0.95), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_deltas(gamma, lam):
    rng = np.random.default_rng(1)
    rewards, values, next_values = (torch.tensor(rng.normal(size=(5, 12))) for _ in range(3))
    terminated = torch.tensor(rng.random((5, 12)) < 0.15)
    truncated = torch.tensor(rng.random((5, 12)) < 0.15) & ~terminated
    truncated[0, -1], terminated[0, -1] = True, False
    ours = fl.compute_gae(rewards, values, next_values, terminated, truncated, gamma, lam)
    for n in range(5):
        for t in range(12):
            total, weight = 0.0, 1.0
            for k in range(t, 12):  # A_t = sum_k (gamma lam)^(k-t) delta_k, up to the episode's end
                bootstrap = 0.0 if terminated[n, k] else gamma * next_values[n, k].item()
                total += weight * (rewards[n, k].item() + bootstrap - values[n, k].item())
                weight *= gamma * lam
                if terminated[n, k] or truncated[n, k]:
                    break
            assert ours[n, t].item() == pytest.approx(total, abs=1e-12)


def golden_gae(case, bootstrap):
    """CleanRL's and SB3's [T][N] layout in ours: (N, T), next_values before any reset."""
    array = lambda name: torch.tensor(case[name], dtype=torch.float64).T  # noqa: E731
    terminated, truncated = array("terminations").bool(), array("truncations").bool()
    values = array("values")
    last = torch.tensor(case["last_value"], dtype=torch.float64)[:, None]
    following = torch.cat([values[:, 1:], last], dim=1)
    done = terminated | truncated
    next_values = torch.where(done, array("final_obs_values"), following)
    if not bootstrap:
        terminated, truncated = done, torch.zeros_like(done)
    gammas = case["gamma"], case["gae_lambda"]
    return fl.compute_gae(array("rewards"), values, next_values, terminated, truncated, *gammas)


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("case", golden("gae")["cases"])
def test_gae_golden(case, bootstrap):
    theirs = case["truncation_bootstrap" if bootstrap else "no_truncation_bootstrap"]
    ours = golden_gae(case, bootstrap).T
    exact = torch.tensor(theirs["ref64_advantages"], dtype=torch.float64)
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)
    sb3 = torch.tensor(theirs["sb3_advantages"], dtype=torch.float64)
    torch.testing.assert_close(ours, sb3, rtol=0, atol=1e-5)


def test_gae_limits():
    """lambda 0 is the TD error; lambda 1 is the Monte Carlo return minus V."""
    _, draw = ragged()
    rewards, values = draw(), draw()
    terminated = torch.zeros_like(rewards, dtype=torch.bool)
    terminated[:, -1] = True
    next_values = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    rest = next_values, terminated, torch.zeros_like(terminated)
    td = fl.compute_gae(rewards, values, *rest, 0.9, 0.0)
    torch.testing.assert_close(td, rewards + 0.9 * next_values - values)
    mc = fl.compute_gae(rewards, values, *rest, 0.9, 1.0) + values
    returns = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        returns = rewards[:, t] + 0.9 * returns
        torch.testing.assert_close(mc[:, t], returns)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_advantages_in_loops(scale):
    scores = torch.rand(5, 6, dtype=torch.float64)
    scores[2] = 0.7  # a flat group
    ours = fl.compute_grpo(scores, scale)
    for b, group in enumerate(scores.tolist()):
        for i, score in enumerate(group):
            expected = score - statistics.mean(group)
            if scale == "group":
                expected /= statistics.stdev(group) + 1e-4
            if scale == "batch":
                expected /= statistics.stdev(scores.flatten().tolist()) + 1e-4
            expected = 0.0 if b == 2 else expected
            assert ours[b, i].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("case", golden("grpo")["advantages"])
def test_grpo_advantages_golden(case):
    size = case["num_generations"]
    rewards = torch.tensor(case["rewards_per_func"])[:, 0].view(-1, size)
    ours = fl.compute_grpo(rewards, case["scale_rewards"]).flatten()
    torch.testing.assert_close(ours, torch.tensor(case["advantages"]), rtol=0, atol=2e-6)
    flat = fl.flat_groups(rewards).repeat_interleave(size)
    if case["scale_rewards"] == "group":
        assert flat.tolist() == case["is_std_zero"]


def test_flat_group_is_exactly_zero_in_float32():
    """Erratum 10: 0.7 has no exact mean in float32; divided by a tiny std that would be signal."""
    scores = torch.full((1, 8), 0.7)
    naive = (scores - scores.mean()) / (scores.std(correction=0) + 1e-8)
    assert naive.abs().max() > 0.5
    for ours in (*(fl.compute_grpo(scores, s) for s in ("group", "batch", "none")),):
        assert torch.equal(ours, torch.zeros_like(scores))
    assert torch.equal(fl.compute_rloo(scores), torch.zeros_like(scores))


def test_rloo_in_loops():
    scores = torch.rand(4, 5, dtype=torch.float64)
    ours = fl.compute_rloo(scores)
    for b, group in enumerate(scores.tolist()):
        for i, score in enumerate(group):
            others = group[:i] + group[i + 1 :]
            assert ours[b, i].item() == pytest.approx(score - statistics.mean(others), abs=1e-12)
    assert torch.allclose(ours, fl.compute_grpo(scores, "none") * 5 / 4)


def test_discounted_return_in_loops():
    rewards = torch.rand(3, 7, dtype=torch.float64)
    ours = fl.discounted_return(rewards, 0.9)
    for row, value in zip(rewards.tolist(), ours.tolist(), strict=True):
        assert value == pytest.approx(sum(0.9**t * r for t, r in enumerate(row)))
    assert torch.equal(fl.discounted_return(rewards, 1.0), rewards.sum(dim=1))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_in_loops(shift_mean):
    mask, draw = ragged()
    x = draw()
    kept = [v for v, m in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True) if m]
    mean, std = statistics.mean(kept), statistics.stdev(kept)
    x[~mask] = 1e6  # padding must not count
    ours = fl.whiten(x, mask, shift_mean)
    assert torch.equal(ours[~mask], torch.zeros_like(ours[~mask]))
    expected = torch.tensor([(v - (mean if shift_mean else 0)) / std for v in kept])
    torch.testing.assert_close(ours[mask], expected.double(), rtol=1e-6, atol=1e-6)
    constant = fl.whiten(torch.full((2, 3), 0.7), torch.ones(2, 3, dtype=torch.bool))
    assert constant.abs().max() < 1e-6
    single = torch.zeros(2, 3, dtype=torch.bool)
    single[0, 0] = True
    assert torch.equal(fl.whiten(torch.ones(2, 3), single), torch.zeros(2, 3))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_ratio_in_loops(level):
    mask, draw = ragged()
    logp, logp_old = draw(), draw()
    logp[~mask] = float("inf")  # exp of padding would be infinite: mask before exp
    ours = fl.importance_ratio(logp, logp_old, mask, level)
    for n in range(len(mask)):
        steps = mask[n].nonzero().flatten().tolist()
        logs = [(logp[n, t] - logp_old[n, t]).item() for t in steps]
        for t, log in zip(steps, logs, strict=True):
            log = statistics.mean(logs) if level == "sequence" else log
            assert ours[n, t].item() == pytest.approx(math.exp(log))
    assert ours.isfinite().all()


@pytest.mark.parametrize("loss_type", ["bnpo", "grpo", "dr_grpo"])
def test_aggregate_in_loops(loss_type):
    mask, draw = ragged()
    x = draw()
    x[~mask] = float("nan")  # padding must not count
    rows = [[v for v in row if not math.isnan(v)] for row in x.tolist()]
    expected = {
        "bnpo": statistics.mean(v for row in rows for v in row),
        "grpo": statistics.mean(statistics.mean(row) for row in rows),
        "dr_grpo": sum(v for row in rows for v in row) / (len(rows) * 50),
    }[loss_type]
    assert fl.aggregate(x, mask, loss_type, 50).item() == pytest.approx(expected)


@pytest.mark.parametrize("case", golden("ppo_clip")["cases"])
def test_clip_golden(case):
    """All combinations of where the ratio lies and the sign of A: loss, gradient."""
    logp = torch.tensor([[case["new_logprob"]]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[case["old_logprob"]]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    ratio = fl.importance_ratio(logp, old, mask)
    advantage = torch.full_like(ratio, case["advantage"])
    epsilon = case["clip_coef"]
    loss = -fl.clipped_surrogate(ratio, advantage, epsilon, epsilon).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    assert logp.grad.item() == pytest.approx(case["dloss_dnewlogprob"], abs=1e-10)


def test_clip_batch_golden():
    batch = golden("ppo_clip")["batch"]
    tensor = lambda name: torch.tensor(batch[name], dtype=torch.float64)[None]  # noqa: E731
    logp, old = tensor("new_logprob").requires_grad_(), tensor("old_logprob")
    mask = torch.ones_like(old, dtype=torch.bool)
    advantages = fl.whiten(tensor("advantages_raw"), mask)
    torch.testing.assert_close(advantages, tensor("advantages_normalised"), rtol=0, atol=1e-7)
    ratio = fl.importance_ratio(logp, old, mask)
    surrogate = fl.clipped_surrogate(ratio, advantages, 0.2, 0.2)
    loss = -fl.aggregate(surrogate, mask, "bnpo", 1)
    loss.backward()
    assert loss.item() == pytest.approx(batch["pg_loss"], abs=1e-7)
    torch.testing.assert_close(logp.grad, tensor("dpg_dnewlogprob"), rtol=0, atol=1e-7)
    k3 = fl.kl_k3(old, logp).mean().item()  # samples come from the old policy
    assert k3 == pytest.approx(batch["approx_kl"], abs=1e-10)
    values, returns = tensor("new_values"), tensor("returns")
    assert fl.value_loss(values, returns).item() == pytest.approx(
        batch["cleanrl_v_loss_unclipped"], abs=1e-10
    )
    explained = fl.explained_variance(tensor("old_values"), returns).item()
    assert explained == pytest.approx(batch["explained_variance_of_old_values"], abs=1e-10)


def test_categorical_golden():
    case = golden("ppo_clip")["categorical"]
    log_probs = torch.tensor(case["logits"], dtype=torch.float64).log_softmax(dim=1)
    entropy = fl.categorical_entropy(log_probs)
    torch.testing.assert_close(entropy, torch.tensor(case["entropy"], dtype=torch.float64))
    chosen = log_probs[torch.arange(4), torch.tensor(case["actions"])]
    torch.testing.assert_close(chosen, torch.tensor(case["log_prob"], dtype=torch.float64))


def test_shapes_must_agree():
    """(N, 1) against (N,) would broadcast to (N, N) and train on nonsense."""
    with pytest.raises(AssertionError):
        fl.clipped_surrogate(torch.ones(3, 1), torch.ones(3), 0.2, 0.2)
    with pytest.raises(AssertionError):
        fl.value_loss(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(AssertionError):
        fl.compute_gae(torch.ones(3, 2), torch.ones(3, 1), *[torch.ones(3, 2)] * 3, 1.0, 1.0)


def test_k3_golden():
    raw = golden("kl_estimators")["raw"]
    log_ratio = torch.tensor(raw["log_ratio"], dtype=torch.float64, requires_grad=True)
    k3 = fl.kl_k3(torch.zeros_like(log_ratio), log_ratio)  # log ratio = log p - log q
    k3.sum().backward()
    expected = torch.tensor(raw["k3"], dtype=torch.float64)
    torch.testing.assert_close(k3.detach(), expected, rtol=0, atol=1e-12)
    slope = torch.tensor(raw["dk3"], dtype=torch.float64)
    torch.testing.assert_close(log_ratio.grad, slope, rtol=0, atol=1e-12)
    assert (k3 >= 0).all()
    for case in golden("kl_estimators")["distributions"]:
        q, p = (torch.tensor(case[k], dtype=torch.float64) for k in ("logq", "logp"))
        mean = (q.exp() * fl.kl_k3(q, p)).sum().item()  # sampled from q, so KL(q || p)
        assert mean == pytest.approx(case["exact_KL_q_p"], abs=1e-12)


GRPO_LOSSES = golden("grpo")["losses"]


@pytest.mark.parametrize("case", GRPO_LOSSES, ids=lambda c: f"{c['loss_type']}-{c['beta']}")
def test_grpo_losses_golden(case):
    """TRL's loss and its gradient: every loss type, scale, KL, asymmetric clip, sequence level."""
    data = golden("grpo")["loss_inputs"]
    tensor = lambda name: torch.tensor(data[name], dtype=torch.float64)  # noqa: E731
    mask = tensor("mask").bool()
    advantages = torch.tensor(
        data["advantages_by_scale_rewards"][case["scale_rewards"]], dtype=torch.float64
    )[:, None].expand_as(mask)
    logp = tensor("per_token_logps").requires_grad_()
    settings = case["settings"]
    low = settings.get("eps", data["epsilon"])
    level = settings.get("level", "token")
    ratio = fl.importance_ratio(logp, tensor("old_per_token_logps"), mask, level)
    objective = fl.clipped_surrogate(ratio, advantages, low, settings.get("eps_high", low))
    objective = objective - case["beta"] * fl.kl_k3(logp, tensor("ref_per_token_logps"))
    length = data["max_completion_length"]
    loss = -fl.aggregate(objective, mask, case["loss_type"], length)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    gradient = torch.tensor(case["grad"], dtype=torch.float64)
    torch.testing.assert_close(logp.grad, gradient, rtol=0, atol=1e-6)


# ---- 2  the environment and the rollout, beside gymnasium ----------------------------------------


def test_maps_follow_the_seed_and_never_meet_the_unseen_ones():
    train, again, other, unseen = (
        fl.draw_maps(np.random.default_rng(seed), 300, 4, held_out=held_out)
        for seed, held_out in ((1, False), (1, False), (2, False), (1, True))
    )
    assert train == again != other
    assert not set(train) & set(unseen)


def test_onehot_and_scalar_planes():
    rows = ("SFFF", "FHFH", "FFFH", "HFFG")
    onehot = fl.build_lakes([rows], False, "onehot", CPU)
    assert onehot.planes.sum(dim=1).eq(1).all()  # each tile is one of S, F, H, G
    assert [int(p.sum()) for p in onehot.planes[0]] == [1, 10, 4, 1]
    scalar = fl.build_lakes([rows], False, "scalar", CPU)
    assert scalar.planes[0, 0].tolist()[1] == [2, 3, 2, 3]  # F H F H
    assert scalar.planes[0, 0, 0, 0] == 0 and scalar.planes[0, 0, 3, 3] == 1  # S, G
    seen = fl.observe(onehot, torch.tensor([0, 6]))
    assert seen.shape == (2, 5, 4, 4)
    assert torch.equal(seen[:, :4], onehot.planes.expand(2, -1, -1, -1))
    assert seen[0, 4].argmax() == 0 and seen[1, 4].argmax() == 6 and seen[:, 4].sum() == 2


@pytest.mark.parametrize("size,limit", [(4, 100), (4, 7), (5, 12)])
def test_rollout_equals_200_gymnasium_environments(size, limit):
    """Without slipping every step must agree: cell, reward, termination, truncation, length."""
    lakes = make_lakes(size=size, number=50)
    generator = torch.Generator().manual_seed(0)
    batch = fl.sample_batch(random_log_probs(lakes), lakes, lakes.start, 4, limit, generator)
    num_cells = size * size
    truncations = 0
    for e in range(200):
        env = gym.make(
            "FrozenLake-v1",
            desc=list(lakes.maps[e // 4]),
            is_slippery=False,
            max_episode_steps=limit,
        )
        cell, _ = env.reset(seed=e)
        for t in range(batch.mask.shape[1]):
            if not batch.mask[e, t]:
                assert t > 0 and batch.rewards[e, t] == 0
                assert not batch.terminated[e, t] and not batch.truncated[e, t]
                continue
            assert batch.cells[e, t] == cell + num_cells * (e // 4)
            cell, reward, terminated, truncated, _ = env.step(int(batch.actions[e, t]))
            assert batch.next_cells[e, t] == cell + num_cells * (e // 4)
            assert batch.rewards[e, t] == reward
            assert batch.terminated[e, t] == terminated
            # at the last step gymnasium reports both; an end on the ice is what we call truncated
            assert batch.truncated[e, t] == (truncated and not terminated)
            assert (t + 1 < batch.mask.shape[1] and bool(batch.mask[e, t + 1])) != (
                terminated or truncated
            )
            truncations += bool(batch.truncated[e, t])
    assert truncations > 0 or limit == 100
    assert batch.rewards.sum() > 0 or limit < 2 * size


def test_slippery_outcomes_match_200_gymnasium_environments():
    """The next cells of gymnasium's environments and of the rollout: one distribution."""
    rows = ("SFFF", "FHFH", "FFFH", "HFFG")
    lakes = fl.build_lakes([rows], True, "onehot", CPU)
    log_probs = torch.full((16, 4), 0.25).log()
    counts = np.zeros((2, 16, 4, 16))  # ours or gymnasium's, cell, action, next cell
    generator = torch.Generator().manual_seed(0)
    batch = fl.sample_batch(log_probs, lakes, lakes.start, 2000, 100, generator)
    index = (x[batch.mask].numpy() for x in (batch.cells, batch.actions, batch.next_cells))
    np.add.at(counts[0], tuple(index), 1)
    rng = np.random.default_rng(0)
    for e in range(200):
        env = gym.make("FrozenLake-v1", desc=list(rows), is_slippery=True)
        cell, _ = env.reset(seed=e)
        for _ in range(10):
            done = False
            while not done:
                action = int(rng.integers(4))
                following, _, terminated, truncated, _ = env.step(action)
                counts[1, cell, action, following] += 1
                cell, done = following, terminated or truncated
            cell, _ = env.reset()
    assert ((counts[0] > 0) == (counts[1] > 0)).all()  # the same outcomes are possible
    p_values = []
    for cell in range(16):
        for action in range(4):
            table = counts[:, cell, action][:, counts[:, cell, action].sum(axis=0) > 0]
            if table.shape[1] > 1:
                p_values.append(stats.chi2_contingency(table).pvalue)
    assert len(p_values) > 30
    assert min(p_values) > 0.01 / len(p_values)  # Bonferroni; fixed seeds, so no flakes
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


def test_actions_are_drawn_from_the_policy():
    lakes = make_lakes(number=1)
    log_probs = random_log_probs(lakes)
    generator = torch.Generator().manual_seed(1)
    batch = fl.sample_batch(log_probs, lakes, lakes.start, 40_000, 1, generator)
    start = int(lakes.start)
    observed = torch.bincount(batch.actions.flatten(), minlength=4).numpy()
    expected = log_probs[start].exp().double().numpy()
    assert stats.chisquare(observed, expected / expected.sum() * 40_000).pvalue > 0.001
    assert torch.equal(batch.logp_old[:, 0], log_probs[start][batch.actions[:, 0]])


@pytest.mark.parametrize("slippery", [False, True])
def test_an_impossible_action_is_never_drawn(slippery, monkeypatch):
    """Not even where the uniform number is exactly 0, the lowest that torch.rand gives."""
    lakes = make_lakes(number=2, slippery=slippery)
    log_probs = torch.full((32, 4), 1 / 3).log()
    log_probs[:, 0] = -torch.inf
    monkeypatch.setattr(fl.torch, "rand", lambda *size, **_: torch.zeros(*size))
    batch = fl.sample_batch(log_probs, lakes, lakes.start, 2, 5, torch.Generator())
    assert (batch.actions == 1).all() and batch.logp_old[batch.mask].isfinite().all()


def test_table_equals_one_forward_pass_per_observation():
    args = make_args("--adv_estimator", "grpo")
    trainer = fl.Trainer(args)
    lakes = make_lakes()
    table = fl.evaluate_cells(trainer.actor, lakes)
    for index in range(lakes.live.numel()):
        if lakes.live.flatten()[index]:
            alone = trainer.actor(fl.observe(lakes, torch.tensor([index])))[0]
            torch.testing.assert_close(table[index], alone, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(table[index], torch.zeros(4))


def test_exploring_starts():
    trainer = fl.Trainer(make_args("--exploring_starts", "1", "--batch_size", "200"))
    seen = {}
    real = fl.sample_batch

    def spy(log_probs, lakes, start, *rest):
        seen.update(lakes=lakes, start=start)
        return real(log_probs, lakes, start, *rest)

    try:
        fl.sample_batch = spy
        trainer.update()
        everywhere = seen["start"]
        assert seen["lakes"].live.gather(1, everywhere[:, None]).all()  # never on a hole or goal
        assert len(everywhere.unique()) == 15  # all cells but the goal
        trainer.args.exploring_starts = 0.25
        trainer.update()
        moved = (seen["start"] != 0).float().mean().item()
        assert 0.1 < moved < 0.4
        trainer.args.exploring_starts = 0.0
        trainer.update()
        assert torch.equal(seen["start"], seen["lakes"].start)
    finally:
        fl.sample_batch = real


# ---- 3  exact evaluation -------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("frozenlake")["cases"])
def test_evaluation_golden(case):
    lakes = fl.build_lakes([tuple(case["desc"])], case["is_slippery"], "onehot", CPU)
    limit = case["time_limit"]
    best = fl.success_probability(lakes, limit)
    live = lakes.live[0]
    expected = torch.tensor(case["V_finite_horizon_gamma1"], dtype=torch.float64)
    torch.testing.assert_close(best[0][live], expected[live], rtol=0, atol=1e-9)
    assert fl.from_start(best, lakes) == pytest.approx(
        case["V_start_finite_horizon_gamma1"], abs=1e-9
    )
    uniform = torch.full((1, len(expected), 4), 0.25)
    assert fl.from_start(fl.success_probability(lakes, limit, uniform), lakes) == pytest.approx(
        case["uniform_random_return_within_time_limit"], abs=1e-9
    )
    greedy = torch.nn.functional.one_hot(torch.tensor(case["greedy_policy_gamma099"]), 4)[None]
    assert fl.from_start(fl.success_probability(lakes, limit, greedy), lakes) == pytest.approx(
        case["greedy099_return_within_time_limit"], abs=1e-9
    )


@pytest.mark.parametrize("slippery", [False, True])
def test_evaluation_in_loops(slippery):
    """The recursion over gymnasium's own table, without tensors."""
    lakes = make_lakes(size=5, number=3, slippery=slippery)
    policy = random_log_probs(lakes).exp().view(3, 25, 4).double()
    ours = fl.success_probability(lakes, 9, policy)
    best = fl.success_probability(lakes, 9)
    for b, rows in enumerate(lakes.maps):
        env = gym.make("FrozenLake-v1", desc=list(rows), is_slippery=slippery)
        table = env.unwrapped.P
        value, optimum = [0.0] * 25, [0.0] * 25
        for _ in range(9):
            back = lambda v, s, a: sum(  # noqa: E731
                p * (r + (0.0 if end else v[s2]))
                for p, s2, r, end in table[s][a]  # noqa: B023
            )
            q = [[back(value, s, a) for a in range(4)] for s in range(25)]
            value = [sum(policy[b, s, a].item() * q[s][a] for a in range(4)) for s in range(25)]
            optimum = [max(back(optimum, s, a) for a in range(4)) for s in range(25)]
        assert ours[b].tolist() == pytest.approx(value, abs=1e-12)
        assert best[b].tolist() == pytest.approx(optimum, abs=1e-12)


@pytest.mark.parametrize("slippery", [False, True])
def test_evaluation_equals_20000_sampled_episodes(slippery):
    lakes = make_lakes(number=4, slippery=slippery, seed=5)
    log_probs = random_log_probs(lakes, seed=3)
    exact = fl.success_probability(lakes, 30, log_probs.exp().view(4, 16, 4))
    generator = torch.Generator().manual_seed(0)
    batch = fl.sample_batch(log_probs, lakes, lakes.start, 5000, 30, generator)
    sampled = batch.rewards.sum(dim=1).view(4, 5000).double()
    p = exact.gather(1, lakes.start[:, None]).squeeze(1)
    error = (p * (1 - p) / 5000).sqrt().clamp(min=1e-4)
    assert (p > 0).all() and (p < 1).all()
    assert ((sampled.mean(dim=1) - p).abs() < 4 * error).all()


# ---- 4  the update -------------------------------------------------------------------------------


def one_batch(*flags: str):
    """A trainer, and a batch of its own policy on its own maps."""
    trainer = fl.Trainer(make_args("--max_grad_norm", "1e9", *flags))
    args = trainer.args
    lakes = trainer.make_lakes(trainer.rng, args.batch_size, held_out=False)
    log_probs = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
    limit = args.max_episode_steps
    sampled = log_probs, lakes, lakes.start, args.group_size, limit, trainer.generator
    return trainer, lakes, fl.sample_batch(*sampled)


def step_by_step(trainer, lakes, batch, advantages, term):
    """-mean over steps of term(log_probs of all actions, action, advantage), one pass per step."""
    trainer.actor.zero_grad()
    total = 0.0
    for e, t in batch.mask.nonzero().tolist():
        observation = fl.observe(lakes, batch.cells[e, t][None])
        log_probs = trainer.actor(observation).log_softmax(dim=1)[0]
        total = total + term(log_probs, batch.actions[e, t], advantages[e, t])
    (-total / batch.mask.sum()).backward()
    return [p.grad.clone() for p in trainer.actor.parameters()]


FEW = "--batch_size", "3", "--group_size", "4", "--max_episode_steps", "12"


@pytest.mark.parametrize("estimator", ["ppo", "grpo", "rloo"])
def test_one_update_is_plain_policy_gradient(estimator):
    """With one pass the ratio is 1: PPO is A2C, GRPO is REINFORCE with the group's baseline."""
    flags = (*FEW, "--num_updates_per_batch", "1", "--entropy_coef", "0.03", "--no-anneal")
    trainer, lakes, batch = one_batch("--adv_estimator", estimator, *flags)
    if estimator == "ppo":
        values = fl.evaluate_cells(trainer.critic, lakes).squeeze(1)
        advantages, returns = fl.prepare_ppo(batch, values, trainer.args)
    else:
        advantages, returns = torch.randn(12, 1).expand_as(batch.mask) * batch.mask, None
    expected = step_by_step(
        trainer,
        lakes,
        batch,
        advantages,
        lambda lp, a, adv: adv * lp[a] - 0.03 * (lp.exp() * lp).sum(),
    )
    metrics = fl.update_model(trainer, lakes, batch, advantages, returns)
    for ours, theirs in zip(trainer.actor.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-3, atol=1e-6)
    assert metrics["losses/clipfrac"] == 0
    assert metrics["losses/approx_kl"] == pytest.approx(0, abs=1e-9)


def test_the_critic_is_fitted_to_the_returns():
    flags = (*FEW, "--num_updates_per_batch", "1", "--critic_loss_coef", "2")
    trainer, lakes, batch = one_batch("--adv_estimator", "ppo", *flags)
    values = fl.evaluate_cells(trainer.critic, lakes).squeeze(1)
    advantages, returns = fl.prepare_ppo(batch, values, trainer.args)
    metrics = fl.update_model(trainer, lakes, batch, advantages, returns)
    expected = 0.5 * (values[batch.cells] - returns)[batch.mask].square().mean()
    assert metrics["losses/value_loss"] == pytest.approx(expected.item(), rel=1e-4)
    fresh = fl.Trainer(trainer.args)
    loss = 0.0
    for e, t in batch.mask.nonzero().tolist():
        value = fresh.critic(fl.observe(lakes, batch.cells[e, t][None]))[0, 0]
        loss = loss + 2 * 0.5 * (value - returns[e, t]) ** 2 / batch.mask.sum()
    loss.backward()
    for ours, theirs in zip(trainer.critic.parameters(), fresh.critic.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_more_passes_move_the_ratio_and_the_clip_acts():
    flags = "--num_updates_per_batch", "8", "--actor_learning_rate", "0.01"
    metrics = fl.Trainer(make_args("--adv_estimator", "grpo", *flags)).update()
    assert metrics["losses/clipfrac"] > 0 and metrics["losses/approx_kl"] > 1e-4


def test_ppo_advantages_and_returns():
    """prepare_ppo on one hand-made batch: a success, a fall, an episode out of time."""
    args = make_args("--adv_estimator", "ppo", "--gamma", "0.9", "--lam", "0.8")
    no = [False, False]
    batch = fl.Batch(
        cells=torch.tensor([[0, 1], [0, 0], [1, 2]]),
        actions=torch.zeros(3, 2, dtype=torch.long),
        next_cells=torch.tensor([[1, 3], [3, 3], [2, 1]]),
        rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        terminated=torch.tensor([[False, True], [True, False], no]),
        truncated=torch.tensor([no, no, [False, True]]),
        mask=torch.tensor([[True, True], [True, False], [True, True]]),
        logp_old=torch.zeros(3, 2),
    )
    value = torch.tensor([0.5, 0.6, 0.7, 9.0])  # cell 3 is an end: its value must not count
    advantages, returns = fl.prepare_ppo(batch, value, args)
    last = 1 - 0.6  # reward on the last action, nothing after it
    first = 0.9 * 0.6 - 0.5 + 0.9 * 0.8 * last
    fall = -0.5
    late = 0.9 * 0.6 - 0.7  # out of time: V of the final observation, not 0
    early = 0.9 * 0.7 - 0.6 + 0.9 * 0.8 * late
    raw = torch.tensor([[first, last], [fall, 0.0], [early, late]])
    kept = raw[batch.mask]
    expected = (raw - kept.mean()) / kept.std() * batch.mask
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[batch.mask], (raw + value[batch.cells])[batch.mask])
    args.whiten_rewards = True
    scale = batch.rewards[batch.mask].std()
    _, scaled = fl.prepare_ppo(batch, torch.zeros(4), args)
    args.whiten_rewards = False
    _, plain = fl.prepare_ppo(batch, torch.zeros(4), args)
    torch.testing.assert_close(scaled, plain / scale, rtol=1e-4, atol=1e-5)


def test_group_advantages_reach_every_step():
    args = make_args("--adv_estimator", "grpo", "--gamma", "0.5", "--group_size", "2")
    rewards = torch.zeros(4, 3)
    rewards[0, 2], rewards[1, 0] = 1.0, 1.0  # a slow and a quick success, two falls
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()
    batch = fl.Batch(*[rewards] * 6, mask=mask, logp_old=rewards)
    batch.rewards = rewards
    ours = fl.prepare_grpo(batch, args)
    scores = torch.tensor([[0.25, 1.0], [0.0, 0.0]])
    expected = fl.compute_grpo(scores, "group").view(4, 1) * mask
    torch.testing.assert_close(ours, expected)
    assert ours[1, 0] > 0 > ours[0, 0]  # below gamma 1 the shorter way is better
    args.adv_estimator = "rloo"
    torch.testing.assert_close(
        fl.prepare_grpo(batch, args), fl.compute_rloo(scores).view(4, 1) * mask
    )


def test_entropy_bonus_raises_entropy():
    flags = (*FEW, "--entropy_coef", "0.1", "--num_updates_per_batch", "2")
    trainer, lakes, batch = one_batch("--adv_estimator", "grpo", *flags)
    for p in trainer.actor.parameters():
        p.data *= 2  # away from uniform, where entropy has room to rise
    before = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
    batch.logp_old = before[batch.cells, batch.actions]
    fl.update_model(trainer, lakes, batch, torch.zeros_like(batch.rewards), None)
    after = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
    visited = batch.cells[batch.mask]
    entropy = lambda table: fl.categorical_entropy(table)[visited].mean()  # noqa: E731
    assert entropy(after) > entropy(before) + 1e-4


def test_kl_penalty_pulls_to_the_reference(tmp_path):
    flags = (*FEW, "--beta", "1", "--num_updates_per_batch", "3", "--actor_learning_rate", "1e-3")
    trainer, lakes, batch = one_batch("--adv_estimator", "grpo", *flags)
    reference = fl.evaluate_cells(trainer.reference, lakes).log_softmax(dim=1)
    for p in trainer.actor.parameters():
        p.data *= 1.5
    before = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
    batch.logp_old = before[batch.cells, batch.actions]
    metrics = fl.update_model(trainer, lakes, batch, torch.zeros_like(batch.rewards), None)
    after = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
    visited = batch.cells[batch.mask]
    kl = lambda p: (p.exp() * (p - reference)).sum(dim=1)[visited].mean()  # noqa: E731
    assert kl(after) < kl(before)
    assert metrics["losses/kl_ref"] > 0
    again = fl.evaluate_cells(trainer.reference, lakes).log_softmax(dim=1)
    assert torch.equal(reference, again)  # it is frozen


def test_annealing_reaches_the_optimisers():
    trainer = fl.Trainer(make_args("--max_steps", "4"))
    rates = []
    for _ in range(4):
        metrics = trainer.update()
        rates.append(metrics["charts/learning_rate"])
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [rates[-1]] * 2
    assert rates == pytest.approx([2e-3, 1.5e-3, 1e-3, 0.5e-3])


def test_nothing_is_created_on_the_wrong_device():
    """Tensors made without a device would land on the default one, here the shapeless `meta`."""
    for flags in (["--adv_estimator", "ppo"], ["--adv_estimator", "grpo", "--beta", "0.1"]):
        flags += ["--exploring_starts", "0.5", "--frozen_lake_slippery", "--device", "cpu"]
        trainer = fl.Trainer(make_args(*flags, "--batch_size", "4", "--eval_maps", "4"))
        trainer.update()  # Adam makes its state at the first step
        with torch.device("meta"):
            metrics = trainer.update()
            result = fl.evaluate(trainer.actor, trainer.eval_lakes, 100)
        assert all(math.isfinite(v) for v in metrics.values())
        assert 0 <= result["eval/sampled"] <= result["eval/optimum"] + 1e-9


@pytest.mark.cuda
@pytest.mark.parametrize("estimator", ["ppo", "grpo"])
def test_cuda(estimator, tmp_path):
    flags = "--adv_estimator", estimator, "--device", "cuda", "--max_steps", "3", "--quiet"
    assert fl.main([*flags, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    checkpoint = fl.load_checkpoint(str(tmp_path / fl.SCRIPT / "a" / "checkpoint-last.pt"))
    assert checkpoint["counters"][0] == 3


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 9])
def test_odd_sizes(size):
    trainer = fl.Trainer(make_args("--frozen_lake_size", str(size), "--eval_maps", "3"))
    assert math.isfinite(trainer.update()["losses/policy_loss"])


def test_rectangular_map_and_flags_of_the_group_family(tmp_path):
    lake = "SFFFFF/FHFHFF/FFFHFF/HFFFFG"
    for flags in (
        ["--loss_type", "grpo", "--scale_rewards", "batch"],
        ["--loss_type", "dr_grpo", "--scale_rewards", "none", "--clip_epsilon_high", "0.28"],
        ["--importance_sampling_level", "sequence", "--beta", "0.04"],
        ["--state_encoding", "scalar", "--detect_anomaly", "--feature_size", "16"],
    ):
        common = ["--adv_estimator", "grpo", "--map", lake, "--max_steps", "2", "--quiet"]
        assert fl.main([*common, *flags, "--output_dir", str(tmp_path)]) == 0
    assert len(list((tmp_path / fl.SCRIPT).iterdir())) == 4  # no run was overwritten


# ---- 5  learning ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ppo", "grpo"])
def test_default_run_learns(estimator, tmp_path):
    """The default flags, but for half the updates; the benchmark has the whole runs."""
    flags = ["--adv_estimator", estimator, "--max_steps", "150", "--eval_maps", "200"]
    result = fl.train(make_args(*flags, "--seed", "1", "--output_dir", str(tmp_path)))
    assert result["sampled"] >= 0.97
    assert result["uniform"] < 0.2 and result["optimum"] == pytest.approx(1.0)
    assert estimator == "grpo" or result["greedy"] >= 0.97
    rows = metrics(Path(result["run_dir"]))
    assert [row["step"] for row in rows] == list(range(1, 151))
    assert rows[0]["score/mean"] < 0.5 < 0.95 < rows[-1]["score/mean"]


@pytest.mark.slow
def test_a_discount_cures_the_greedy_policy(tmp_path):
    flags = ["--adv_estimator", "grpo", "--gamma", "0.99", "--max_steps", "100", "--seed", "1"]
    flags += ["--eval_maps", "200", "--eval_every", "0", "--output_dir", str(tmp_path)]
    assert fl.train(make_args(*flags))["greedy"] >= 0.94


# ---- 6  run folder, checkpoints, resume ----------------------------------------------------------


SHORT = ["--quiet", "--threads", "1", "--batch_size", "4", "--group_size", "4", "--max_steps", "6"]
SHORT += ["--save_steps", "3", "--eval_every", "2", "--eval_maps", "5"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--adv_estimator", "ppo", "--frozen_lake_slippery"],
        ["--adv_estimator", "grpo", "--beta", "0.1", "--exploring_starts", "0.5"],
    ],
)
def test_resume_equals_never_stopping(flags, tmp_path, monkeypatch):
    common = [*SHORT, *flags, "--entropy_coef", "0.01", "--output_dir", str(tmp_path)]
    assert fl.main([*common, "--run_name", "whole"]) == 0
    whole = tmp_path / fl.SCRIPT / "whole"
    _, updates = check_resume(fl, whole, "checkpoint-000003.pt", monkeypatch)
    assert updates == 3  # not all over again
    assert fl.main([*common, "--run_name", "again"]) == 0
    assert same(state(whole), state(tmp_path / fl.SCRIPT / "again"))
    assert fl.main([*common, "--run_name", "other", "--seed", "7"]) == 0
    assert not same(state(whole), state(tmp_path / fl.SCRIPT / "other"))


def test_reference_from_a_checkpoint_survives_resume(tmp_path):
    common = [*SHORT, "--adv_estimator", "grpo", "--output_dir", str(tmp_path)]
    assert fl.main([*common, "--run_name", "first"]) == 0
    first = tmp_path / fl.SCRIPT / "first" / "checkpoint-last.pt"
    flags = ["--beta", "0.1", "--reference", str(first), "--seed", "3"]
    assert fl.main([*common, *flags, "--run_name", "second"]) == 0
    second = tmp_path / fl.SCRIPT / "second"
    half = tmp_path / fl.SCRIPT / "half"
    half.mkdir()
    shutil.copy(second / "checkpoint-000003.pt", half)
    actor = fl.load_checkpoint(str(first))["parts"]["actor"]
    assert same(state(second)["parts"]["reference"], actor)
    whole = state(second)
    first.unlink()  # the checkpoint holds the reference itself
    assert fl.main(["--resume", str(half / "checkpoint-000003.pt"), "--quiet"]) == 0
    assert same(state(half), whole)


def test_run_folder(tmp_path):
    assert fl.main([*SHORT, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    folder = tmp_path / fl.SCRIPT / "a"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoint-000003.pt", "checkpoint-last.pt"} <= names
    assert not any(name.endswith(".tmp") for name in names)
    config = json.loads((folder / "config.json").read_text())
    assert config["seed"] == 42 and config["gamma"] == 0.95 and config["torch"]
    tags = events_of(folder, images=0).Tags()
    expected = {
        "charts": ["episodic_return", "episodic_length", "learning_rate", "SPS", "env_steps"],
        "losses": ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm"],
        "group": ["zero_std_frac", "reward_std"],
        "score": ["mean", "max", "min"],
        "eval": ["sampled", "greedy", "optimum", "uniform"],
        "hparam": ["sampled", "greedy"],
    }
    expected = {f"{group}/{name}" for group, names in expected.items() for name in names}
    expected.add("losses/explained_variance")
    assert expected <= set(tags["scalars"])
    assert tags["images"] == ["agent/sampled"]
    assert fl.main([*SHORT, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    assert (tmp_path / fl.SCRIPT / "a-2").is_dir()  # never overwritten


def test_infer(tmp_path, capsys):
    assert fl.main([*SHORT, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    path = str(tmp_path / fl.SCRIPT / "a" / "checkpoint-last.pt")
    before = Path(path).read_bytes()
    assert fl.main(["--infer", path]) == 0
    text = capsys.readouterr().out
    assert set("←↓→↑") & set(text) and "exact success" in text and "the goal" in text
    assert fl.main(["--infer", path]) == 0
    assert capsys.readouterr().out == text  # the same seed shows the same
    assert fl.main(["--infer", path, "--seed", "1", "--greedy", "--render", "gif"]) == 0
    from PIL import Image

    with Image.open(tmp_path / fl.SCRIPT / "a" / "episode-seed1.gif") as gif:
        assert gif.format == "GIF" and gif.n_frames >= 2
    assert fl.main(["--infer", path, "--map", "4x4", "--frozen_lake_slippery"]) == 0
    assert "SFFF" in capsys.readouterr().out
    assert Path(path).read_bytes() == before


def test_interrupt_saves_and_resumes_exactly(tmp_path):
    """Ctrl-C in a real process: exit 130, a whole checkpoint, and a resume that loses nothing."""
    common = [*SHORT[:7], "--max_steps", "100000", "--save_steps", "0", "--eval_every", "0"]
    flags = [*common, "--eval_maps", "3", "--no-anneal", "--output_dir", str(tmp_path)]
    process = start(fl, [*flags, "--run_name", "a"])
    rows = tmp_path / fl.SCRIPT / "a" / "metrics.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and not (rows.exists() and rows.read_text().count("\n") > 3):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    folder = rows.parent
    step = state(folder)["counters"][0]
    assert len(metrics(folder)) == step >= 3
    more = ["--max_steps", str(step + 2), "--quiet"]
    assert fl.main(["--resume", str(folder / "checkpoint-last.pt"), *more]) == 0
    assert fl.main([*flags, "--run_name", "b", "--max_steps", str(step + 2)]) == 0
    assert same(state(folder), state(tmp_path / fl.SCRIPT / "b"))


def test_an_agent_of_large_maps_is_shown_on_a_named_one(tmp_path):
    """--frozen_lake_size comes from the checkpoint then, and is no contradiction."""
    flags = ["--frozen_lake_size", "8", "--batch_size", "2", "--eval_maps", "2", "--max_steps", "1"]
    assert fl.main([*flags, "--quiet", "--output_dir", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("checkpoint-last.pt")
    assert fl.parse_args(["--infer", str(path), "--map", "8x8"]).map.count("/") == 7


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch, capsys):
    check_second_interrupt(fl, [*SHORT, "--output_dir", str(tmp_path)], monkeypatch, capsys)


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    assert fl.main([*SHORT, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    path = tmp_path / fl.SCRIPT / "a" / "checkpoint-last.pt"
    flags = ["--resume", str(path), "--max_steps", "9"]
    check_full_disk(fl, path, flags, monkeypatch, capsys)


def test_kill_while_saving_keeps_the_last_checkpoint(tmp_path):
    """kill -9 between writing the temporary file and renaming it, and in the middle of writing."""
    assert fl.main([*SHORT, "--output_dir", str(tmp_path), "--run_name", "a"]) == 0
    folder = tmp_path / fl.SCRIPT / "a"
    path = folder / "checkpoint-last.pt"
    check_kill_while_saving(fl, path, "--max_steps", "9")
    assert fl.main(["--resume", str(path), "--max_steps", "9", "--quiet"]) == 0
    assert [row["step"] for row in metrics(folder)] == list(range(1, 10))


@pytest.mark.parametrize("name", ["compute_grpo", "value_loss", "clipped_surrogate"])
def test_nan_stops_the_run_and_names_the_tensor(name, tmp_path, monkeypatch, capsys):
    flags = [*SHORT, "--save_steps", "1", "--output_dir", str(tmp_path), "--run_name", "a"]
    flags += ["--adv_estimator", "grpo" if name == "compute_grpo" else "ppo"]
    break_with_nan(monkeypatch, fl, name, after=6)
    assert fl.main([*flags, "--max_steps", "20"]) == 1
    error = capsys.readouterr().err
    assert ("advantages" if name == "compute_grpo" else "loss") in error
    folder = tmp_path / fl.SCRIPT / "a"
    step = state(folder)["counters"][0]
    assert f"update {step + 1}" in error  # the last good checkpoint is the update before
    parts = state(folder)["parts"]
    assert all(v.isfinite().all() for v in parts["actor"].values())


def test_flat_groups_are_reported(tmp_path, capsys):
    """8x8: nobody arrives, nearly every group is flat, and the script says so, once."""
    flags = ["--frozen_lake_size", "8", "--batch_size", "8", "--max_steps", "30", "--threads", "1"]
    flags += ["--eval_maps", "2", "--eval_every", "0", "--save_steps", "0"]
    assert fl.main([*flags, "--adv_estimator", "grpo", "--output_dir", str(tmp_path)]) == 0
    text = capsys.readouterr()
    assert (text.out + text.err).count("--exploring_starts") == 1
    # where all arrive the groups are flat, too, and nothing is wrong
    easy = ["--map", "SFFF/GFFF/FFFF/FFFF", "--batch_size", "2", "--max_steps", "60"]
    easy += ["--threads", "1", "--save_steps", "0", "--output_dir", str(tmp_path)]
    assert fl.main([*easy, "--adv_estimator", "grpo", "--gamma", "0.99"]) == 0
    text = capsys.readouterr()
    assert "warning" not in text.out + text.err
    rows = (tmp_path / fl.SCRIPT / "grpo-4x4-fixed-seed42" / "metrics.jsonl").read_text()
    assert sum(json.loads(r)["group/zero_std_frac"] == 1 for r in rows.splitlines()) > 20


# ---- 7  bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--group_size", "1"], "group_size"),
        (["--group_size", "two"], "group_size"),
        (["--frozen_lake_size", "3"], "frozen_lake_size"),
        (["--gamma", "1.5"], "gamma"),
        (["--gamma", "nan"], "gamma"),
        (["--lam", "-1"], "lam"),
        (["--clip_epsilon", "-0.1"], "clip_epsilon"),
        (["--batch_size", "0"], "batch_size"),
        (["--max_steps", "0"], "max_steps"),
        (["--actor_learning_rate", "-1e-3"], "actor_learning_rate"),
        (["--exploring_starts", "2"], "exploring_starts"),
        (["--device", "toaster"], "device"),
        (["--device", "meta"], "device"),
        (["--adv_estimator", "reinforce"], "adv_estimator"),
        (["--map", "FFFF/FHFH/FFFH/HFFG"], "map"),
        (["--map", "SFFF/FHFH/FFFH/HFFF"], "map"),
        (["--map", "SFFF/FHFH/FFF/HFFG"], "map"),
        (["--map", "SFFS/FHFH/FFFH/HFFG"], "map"),
        (["--map", "SFF/FFF/FFG"], "map"),
        (["--map", "9x9"], "map"),
        (["--map", ""], "map"),
        (["--map", "8x8", "--frozen_lake_size", "8"], "frozen_lake_size"),
        (["--whiten_rewards", "--adv_estimator", "grpo"], "whiten_rewards"),
        (["--lam", "0.9", "--adv_estimator", "grpo"], "lam"),
        (["--critic_learning_rate", "1e-3", "--adv_estimator", "rloo"], "critic_learning_rate"),
        (["--critic_loss_coef", "0.3", "--adv_estimator", "grpo"], "critic_loss_coef"),
        (["--scale_rewards", "none"], "scale_rewards"),
        (["--scale_rewards", "batch", "--adv_estimator", "rloo"], "scale_rewards"),
        (["--importance_sampling_level", "sequence"], "importance_sampling_level"),
        (["--reference", "CHECKPOINT"], "reference"),
        (["--resume", "MISSING"], "resume"),
        (["--resume", "TRUNCATED"], "resume"),
        (["--resume", "FOREIGN"], "resume"),
        (["--resume", "TEXT"], "resume"),
        (["--resume", "CHECKPOINT", "--adv_estimator", "grpo"], "adv_estimator"),
        (["--resume", "CHECKPOINT", "--seed", "1"], "seed"),
        (["--resume", "CHECKPOINT"], "max_steps"),
        (["--resume", "EARLIER", "--max_steps", "9"], "resume"),
        (["--resume", "OLDER"], "resume"),
        (["--infer", "CHECKPOINT", "--beta", "0.1"], "beta"),
        (["--run_name", "a/b"], "run_name"),
        (["--run_name", ".."], "run_name"),
        (["--run_name", ""], "run_name"),
        (["--seed", "99999999999999999999"], "seed"),
        (["--resume", "CHECKPOINT", "--infer", "CHECKPOINT"], "infer"),
        (["--infer", "FOLDER"], "infer"),
        (["--infer", "CHECKPOINT", "--map", "8x8"], "infer"),
        (["--infer", "CHECKPOINT", "--batch_size", "3"], "batch_size"),
        (["--beta", "1", "--reference", "CHECKPOINT", "--frozen_lake_size", "8"], "reference"),
    ],
)
def test_bad_input(flags, word, tmp_path, capsys, files):
    flags = [str(files.get(flag, flag)) for flag in flags]
    error = check_refused(
        fl, flags, tmp_path, capsys, [files["FOLDER"], files["CHECKPOINT"].parent]
    )
    assert error.startswith(f"argument --{word}")


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--map", "SHFF/HHFH/FFFH/HFFG"], "map"),
        (["--max_episode_steps", "5"], "max_episode_steps"),
    ],
)
def test_a_goal_out_of_reach(flags, word, tmp_path, capsys):
    assert fl.main([*flags, "--output_dir", str(tmp_path / "out")]) == 2
    assert f"argument --{word}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is a good device")
def test_cuda_without_one(capsys):
    with pytest.raises(SystemExit) as stopped:
        fl.main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert "argument --device" in capsys.readouterr().err


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    fl.main([*SHORT, "--output_dir", str(folder), "--run_name", "a"])
    return folder / fl.SCRIPT / "a" / "checkpoint-last.pt"


@pytest.fixture(scope="session")
def files(checkpoint, tmp_path_factory) -> dict[str, Path]:
    found = bad_files(fl, checkpoint, tmp_path_factory.mktemp("bad"), missing="loss_type")
    return found | {"EARLIER": checkpoint.with_name("checkpoint-000003.pt")}


def test_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    check_unwritable(fl, [*SHORT, "--output_dir", str(tmp_path / "file" / "runs")], capsys)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path):
    flags = [*SHORT, "--run_name", "a", "--output_dir", str(tmp_path)]
    for process in [start(fl, flags) for _ in range(2)]:
        process.join(100)
        assert process.exitcode == 0
    for name in ("a", "a-2"):
        rows = metrics(tmp_path / fl.SCRIPT / name)
        assert [row["step"] for row in rows] == list(range(1, 7))


# ---- 8  flags reach where they act ---------------------------------------------------------------


class Table(torch.nn.Module):
    """An actor whose logits are a given table (S, 4), the same on every map."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, observations):
        return observations[:, -1].flatten(1) @ self.logits  # the last plane is the agent's


def test_evaluate_is_of_softmax_argmax_best_and_chance():
    lakes = make_lakes(number=5, slippery=True)
    logits = torch.randn(16, 4)
    result = fl.evaluate(Table(logits), lakes, 40)
    policies = {
        "sampled": logits.exp() / logits.exp().sum(dim=1, keepdim=True),
        "greedy": (logits == logits.amax(dim=1, keepdim=True)).float(),
        "uniform": torch.full((16, 4), 0.25),
    }
    for name, policy in policies.items():
        value = fl.success_probability(lakes, 40, policy.expand(5, 16, 4))
        expected = np.mean([value[b, lakes.start[b]].item() for b in range(5)])
        assert result[f"eval/{name}"] == pytest.approx(expected, abs=1e-6)
    assert result["eval/optimum"] > max(result["eval/sampled"], result["eval/greedy"])


def test_play_takes_the_policys_actions():
    """Greedy follows the argmax; sampling does not; both in gymnasium's own environment."""
    lakes = fl.build_lakes([("SFFF", "FFFF", "FFFF", "FFFG")], False, "onehot", CPU)
    logits = torch.zeros(16, 4)
    logits[:, 2], logits[[3, 7, 11], 1] = 1.0, 2.0  # right, and down at the edge
    args = make_args("--greedy")
    frames, reward = fl.play(Table(logits), args, lakes, "ansi")
    assert reward == 1 and len(frames) == 7
    assert [line for f in frames[1:] for line in f.splitlines() if "(" in line] == [
        *["  (Right)"] * 3,
        *["  (Down)"] * 3,
    ]
    args.greedy = False
    lengths = set()
    for args.seed in range(5):
        lengths.add(len(fl.play(Table(logits), args, lakes, "ansi")[0]))
    assert len(lengths) > 1


def test_play_slips_only_on_slippery_ice():
    lakes = fl.build_lakes([("SFFF", "FFFF", "FFFF", "FFFG")], False, "onehot", CPU)
    logits = torch.zeros(16, 4)
    logits[:, 2], logits[[3, 7, 11], 1] = 1.0, 2.0
    for flags, numbers in (["--greedy"], {7}), (["--greedy", "--frozen_lake_slippery"], set()):
        args, lengths = make_args(*flags), set()
        for args.seed in range(4):
            lengths.add(len(fl.play(Table(logits), args, lakes, "ansi")[0]))
        assert lengths == numbers or (not numbers and len(lengths) > 1)


def test_passes_over_a_batch_are_steps_of_the_optimiser():
    for passes in (1, 3):
        trainer = fl.Trainer(make_args("--num_updates_per_batch", str(passes), "--eval_maps", "1"))
        trainer.update()
        steps = {int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()}
        assert steps == {passes}


def test_arrows_point_where_gymnasium_goes(checkpoint, capsys):
    lakes = fl.build_lakes([("SFFF", "FFFF", "FFFF", "FFFG")], False, "onehot", CPU)
    moves = {-1: "←", 4: "↓", 1: "→", -4: "↑"}  # difference of the cell's number
    arrow = [moves[int(lakes.next_cell[0, 5, a, 0]) - 5] for a in range(4)]
    assert fl.main(["--infer", str(checkpoint), "--map", "SFFF/FFFF/FFFF/FFFG"]) == 0
    shown = [line[-4:] for line in capsys.readouterr().out.splitlines()[1:5]]
    actor = fl.conv_net(5, 4, 4, 32, outputs=4)
    actor.load_state_dict(fl.load_checkpoint(str(checkpoint))["parts"]["actor"])
    best = fl.evaluate_cells(actor, lakes).argmax(dim=1).tolist()
    expected = [arrow[a] for a in best[:15]] + ["G"]
    assert "".join(shown) == "".join(expected)


def test_a_start_anywhere():
    rows = ("FFFF", "FFSF", "FHFF", "FFFG")
    lakes = fl.build_lakes([rows, rows], False, "onehot", CPU)
    assert lakes.start.tolist() == [6, 6]
    generator = torch.Generator().manual_seed(0)
    batch = fl.sample_batch(random_log_probs(lakes), lakes, lakes.start, 3, 9, generator)
    assert batch.cells[:, 0].tolist() == [6, 6, 6, 22, 22, 22]


def test_unseen_maps_are_unseen_and_the_same_for_all_seeds(monkeypatch):
    flags = ["--eval_maps", "200", "--group_size", "2", "--num_updates_per_batch", "1"]
    one, two = (fl.Trainer(make_args(*flags, "--seed", seed)) for seed in "12")
    assert one.eval_lakes.maps == two.eval_lakes.maps
    trained = set()
    real = fl.sample_batch

    def spy(log_probs, lakes, *rest):
        trained.update(lakes.maps)
        return real(log_probs, lakes, *rest)

    monkeypatch.setattr(fl, "sample_batch", spy)
    for _ in range(40):
        one.update()
    assert len(trained) > 200 and not trained & set(one.eval_lakes.maps)


def test_defaults_that_depend_on_other_flags():
    gammas = {e: make_args("--adv_estimator", e).gamma for e in ("ppo", "grpo", "rloo")}
    assert gammas == {"ppo": 0.95, "grpo": 1.0, "rloo": 1.0}
    assert make_args("--gamma", "0.5").gamma == 0.5
    assert make_args("--map", "8x8").max_episode_steps == 200


def test_scale_rewards_reaches_the_advantages():
    batch = one_batch("--adv_estimator", "grpo", *FEW)[2]
    batch.rewards[0, 0] += 1
    for scale in ("group", "batch", "none"):
        args = make_args("--adv_estimator", "grpo", *FEW, "--scale_rewards", scale)
        scores = batch.rewards.sum(dim=1).view(3, 4)
        expected = fl.compute_grpo(scores, scale).view(12, 1) * batch.mask
        torch.testing.assert_close(fl.prepare_grpo(batch, args), expected)


def test_each_network_has_its_own_rate_and_clip():
    flags = "--actor_learning_rate", "0.004", "--critic_learning_rate", "0.002"
    clip = "--max_grad_norm", "0.001", "--max_steps", "2", "--num_updates_per_batch", "1"
    trainer = fl.Trainer(make_args(*flags, *clip))
    before = [p.clone() for p in trainer.actor.parameters()]
    metrics = trainer.update()
    norms = [
        torch.stack([p.grad.norm() for p in network.parameters()]).norm().item()
        for network in (trainer.actor, trainer.critic)
    ]
    assert norms == pytest.approx([0.001, 0.001], rel=1e-3)
    assert metrics["losses/grad_norm"] > 0.002  # as it was before clipping
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.004, 0.002]
    step = max(
        (p - q).abs().max().item() for p, q in zip(before, trainer.actor.parameters(), strict=True)
    )
    assert step == pytest.approx(0.004, rel=0.05)  # Adam's first step is the learning rate
    trainer.update()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.002, 0.001]


def test_counters_and_group_statistics(monkeypatch):
    kept = []
    real = fl.sample_batch
    monkeypatch.setattr(fl, "sample_batch", lambda *a: kept.append(real(*a)) or kept[-1])
    trainer = fl.Trainer(make_args("--adv_estimator", "grpo", "--gamma", "0.9"))
    metrics = [trainer.update(), trainer.update()]
    assert trainer.env_steps == sum(int(batch.mask.sum()) for batch in kept)
    for row, batch in zip(metrics, kept, strict=True):
        advantages = fl.prepare_grpo(batch, trainer.args).view(32, -1)
        flat = (advantages == 0).all(dim=1).float().mean().item()
        assert row["group/zero_std_frac"] == pytest.approx(flat)  # those without a gradient
        assert row["score/mean"] == pytest.approx(batch.rewards.sum(dim=1).mean().item())
        spreads = []
        for m in range(32):  # episodes 8m to 8m+7 walk on map m
            assert (batch.cells[8 * m : 8 * m + 8] // 16 == m).all()
            rewards = batch.rewards[8 * m : 8 * m + 8].tolist()
            returns = [sum(0.9**t * r for t, r in enumerate(episode)) for episode in rewards]
            spreads.append(statistics.stdev(returns))
        assert row["group/reward_std"] == pytest.approx(statistics.mean(spreads), abs=1e-6)
        lengths = batch.mask.sum(dim=1).float().mean().item()
        assert row["charts/episodic_length"] == pytest.approx(lengths)


def test_summary_says_solved_where_it_is():
    result = {"sampled": 0.5, "greedy": 0.9, "optimum": 0.92, "uniform": 0.1, "maps": 5, "step": 9}
    result |= {"env_steps": 7, "train_seconds": 1.0, "seconds": 2.0, "run_dir": "r/s/a"}
    result["stopped"] = False
    dry, slippery = make_args(), make_args("--frozen_lake_slippery")
    assert "\nnot solved: 54.3%" in fl.summary(result, dry)  # dry ice: the sampled policy
    assert "\nsolved: 97.8%" in fl.summary(result, slippery)  # slippery: the better of the two
    assert "\nsolved: 99.8%" in fl.summary(result | {"sampled": 0.918}, dry)
    grpo = make_args("--adv_estimator", "grpo")
    lags = result | {"sampled": 0.92}
    assert "greedy lags" in fl.summary(lags, grpo) and "greedy lags" not in fl.summary(lags, dry)
    assert "--resume r/s/a/checkpoint-last.pt" in fl.summary(result | {"stopped": True}, dry)


@pytest.mark.parametrize("loss_type", ["bnpo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("level,high", [("token", None), ("token", 0.6), ("sequence", 0.6)])
def test_update_in_loops_where_the_clip_acts(loss_type, level, high):
    """Every flag of the loss in one pass whose ratio is not 1: gradient and metrics."""
    flags = ["--loss_type", loss_type, "--importance_sampling_level", level, "--beta", "0.5"]
    flags += ["--clip_epsilon", "0.3", "--entropy_coef", "0.2", "--num_updates_per_batch", "1"]
    flags += ["--max_steps", "4", *(["--clip_epsilon_high", str(high)] if high else [])]
    trainer, lakes, batch = one_batch("--adv_estimator", "grpo", *FEW, *flags)
    trainer.step = 1  # the entropy bonus is annealed to 3/4
    trainer.args.max_episode_steps = 50  # dr_grpo's length, not that of the longest episode
    torch.manual_seed(1)
    for p in trainer.reference.parameters():
        p.data += 0.05 * torch.randn_like(p)
    noise = torch.randn_like(batch.logp_old) + torch.randn(len(batch.mask), 1)
    batch.logp_old = batch.logp_old + 0.5 * noise
    advantages = torch.randn_like(batch.logp_old) * batch.mask
    low, high = 0.3, high or 0.3

    trainer.actor.zero_grad()
    rows, seen = [], {"clipfrac": [], "approx_kl": [], "kl_ref": [], "entropy": []}
    for e in range(len(batch.mask)):
        steps = []
        for t in batch.mask[e].nonzero().flatten().tolist():
            observation = fl.observe(lakes, batch.cells[e, t][None])
            log_probs = trainer.actor(observation).log_softmax(dim=1)[0]
            with torch.no_grad():
                reference = trainer.reference(observation).log_softmax(dim=1)[0]
            steps.append((t, log_probs, reference[batch.actions[e, t]]))
        logs = [lp[batch.actions[e, t]] - batch.logp_old[e, t] for t, lp, _ in steps]
        if level == "sequence":
            logs = [sum(logs) / len(logs)] * len(logs)
        row = []
        for (t, lp, ref), log in zip(steps, logs, strict=True):
            a, advantage, ratio = batch.actions[e, t], advantages[e, t], log.exp()
            if advantage > 0:
                surrogate = min(ratio, torch.tensor(1 + high)) * advantage
            else:
                surrogate = max(ratio, torch.tensor(1 - low)) * advantage
            entropy = -(lp.exp() * lp).sum()
            kl = (ref - lp[a]).exp() - (ref - lp[a]) - 1
            row.append(surrogate + 0.2 * 0.75 * entropy - 0.5 * kl)
            moved = (lp[a] - batch.logp_old[e, t]).detach()
            seen["clipfrac"].append(float(ratio < 1 - low or ratio > 1 + high))
            seen["approx_kl"].append((moved.exp() - moved - 1).item())
            seen["kl_ref"].append(kl.item())
            seen["entropy"].append(entropy.item())
        rows.append(row)
    total = sum(sum(row) for row in rows)
    objective = {
        "bnpo": total / sum(len(row) for row in rows),
        "grpo": sum(sum(row) / len(row) for row in rows) / len(rows),
        "dr_grpo": total / (len(rows) * 50),
    }[loss_type]
    (-objective).backward()
    expected = [p.grad.clone() for p in trainer.actor.parameters()]
    metrics = fl.update_model(trainer, lakes, batch, advantages, None)
    for p, theirs in zip(trainer.actor.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, theirs, rtol=1e-3, atol=1e-6)
    assert 0.1 < statistics.mean(seen["clipfrac"]) < 0.9
    for name, values in seen.items():
        assert metrics[f"losses/{name}"] == pytest.approx(statistics.mean(values), rel=1e-4)
